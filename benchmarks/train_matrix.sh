#!/usr/bin/env bash
# Training against TRL on every pair of model and data of docs/performance.md, and its tables.
#
#   benchmarks/train_matrix.sh [CELL...]        writes docs/runs/train_CELL.json; default: all cells, listed below
#
# A cell whose file is there is not measured again. MODEL is a folder with SmolLM2-135M (build_scripts/get_small_lm.sh),
# REPEATS the rounds of each cell (3), THREADS those of every process (all), FOLDER another place for the files.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
model=${MODEL:-models/SmolLM2-135M-Instruct}
folder=${FOLDER:-docs/runs}

small=(--model 5m --tokenizer "$model" --pairs 128)
large=(--model "$model" --pairs 32 --batch_size 16 --micro_batch_sizes 4 --peer_batch_size 16 --peer_batches 2 4
    --only "plain, 4" "packed, 4" "TRL defaults" "TRL grouped")
groups=(--data pool --responses_per_prompt 8)
cell_flags() { # CELL: its flags, one a line
    case $1 in
        hh_5m) printf '%s\n' "${small[@]}" --data hh ;;
        hh_135m) printf '%s\n' "${large[@]}" --data hh ;;
        gsm8k_5m) printf '%s\n' "${small[@]}" --data gsm8k ;;
        gsm8k_135m) printf '%s\n' "${large[@]}" --data gsm8k ;;
        pool_5m) printf '%s\n' "${small[@]}" "${groups[@]}" --pairs 16 --peer_pairs 128 --micro_batch_sizes 1 2 ;;
        pool_135m) printf '%s\n' "${large[@]}" "${groups[@]}" --pairs 4 --batch_size 4 --micro_batch_sizes 1 \
            --peer_pairs 24 --peer_batch_size 8 --only "plain, 1" "packed, 1" "TRL defaults" "TRL grouped" ;;
        *)
            echo "train_matrix.sh: no cell $1" >&2
            return 1
            ;;
    esac
}

cells=("$@")
((${#cells[@]})) || cells=(hh_5m gsm8k_5m pool_5m hh_135m gsm8k_135m pool_135m)
for cell in "${cells[@]}"; do
    flags=$(cell_flags "$cell")
    mapfile -t flags <<<"$flags"
    target=$folder/train_$cell.json
    if [[ -f $target ]]; then
        echo "$target is there"
        continue
    fi
    echo "== $cell"
    "$python" benchmarks/bench_train.py "${flags[@]}" --repeats "${REPEATS:-3}" --threads "${THREADS:-$(nproc)}" \
        --clock "${CLOCK:-wall}" --profile --json "$target"
done
"$python" benchmarks/train_table.py "$folder"/train_*.json
