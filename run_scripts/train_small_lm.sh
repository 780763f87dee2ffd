#!/usr/bin/env bash
# Proof on real data with a real, small language model (SmolLM2-135M), sized for a CPU: vanilla and contrastive model
# on GSM8K solutions, goal state, scores of held-out solutions; and both strategies on helpful-harmless dialogues.
#
#   DATA=<folder> run_scripts/train_small_lm.sh [gsm8k] [hh]
#
# DATA holds gsm8k_solutions/{train,validation}.jsonl (labelled solutions) and hh_harmless_dev.jsonl.gz. Finished parts
# are kept: run it again to go on. PAIRS (120, of GSM8K) and OUT (runs/small_lm) can be set.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH"
DATA=${DATA:?set DATA to the folder with gsm8k_solutions and hh_harmless_dev.jsonl.gz}
OUT=${OUT:-runs/small_lm}
PAIRS=${PAIRS:-120}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
tasks=${*:-gsm8k hh}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}

[[ -f $MODEL/config.json ]] || bash build_scripts/get_small_lm.sh "$MODEL"
mkdir -p "$OUT"

finished() { [[ -f $1/manifest.json ]] && grep -q '"status": "finished"' "$1/manifest.json"; }

train() { # task, strategy, data flags
    local task=$1 strategy=$2
    shift 2
    local folder=$OUT/$task-$strategy
    finished "$folder" && return
    python examples/train_rm.py --pretrain "$MODEL" --save_path "$folder" --reward_model_strategy "$strategy" \
        --train_batch_size 8 --micro_train_batch_size 2 --max_len 256 --seed 0 "$@"
}

if [[ " $tasks " == *" gsm8k "* ]]; then
    python -m openrlhf.cli.data_setup --solutions "$DATA/gsm8k_solutions/train.jsonl" --strip_calculator \
        --pairs_per_question 1 --output "$OUT/gsm8k_pairs.jsonl"
    python -m openrlhf.cli.data_setup --solutions "$DATA/gsm8k_solutions/validation.jsonl" --strip_calculator \
        --pairs_per_question 1 --output "$OUT/gsm8k_validation_pairs.jsonl"
    head -n "$PAIRS" "$OUT/gsm8k_pairs.jsonl" >"$OUT/gsm8k_train.jsonl"
    for strategy in vanilla contrastive; do
        train gsm8k "$strategy" --dataset "$OUT/gsm8k_train.jsonl" --eval_dataset "$OUT/gsm8k_validation_pairs.jsonl" \
            --input_template plain --learning_rate 5e-5
    done
    goal=$OUT/gsm8k-contrastive-goal
    [[ -f $goal/goal_state.npy ]] || python examples/get_representation.py --dataset "$OUT/gsm8k_train.jsonl" \
        --reward_model "$OUT/gsm8k-contrastive" --save_dir "$goal"
    python examples/eval_rm.py --completions_data_path "$DATA/gsm8k_solutions/validation.jsonl" --batch_tokens 4096 \
        --reward_model_path "$OUT/gsm8k-vanilla" --save_dir "$OUT/scores" --vanilla
    python examples/eval_rm.py --completions_data_path "$DATA/gsm8k_solutions/validation.jsonl" --batch_tokens 4096 \
        --reward_model_path "$OUT/gsm8k-contrastive" --save_dir "$OUT/scores" --goal_state_path "$goal"
    python examples/metrics.py --scored_path "$OUT/scores/gsm8k-contrastive" "$OUT/scores/gsm8k-vanilla" \
        --output "$OUT/gsm8k_figures.json"
fi

if [[ " $tasks " == *" hh "* ]]; then
    for strategy in vanilla contrastive; do
        train hh "$strategy" --dataset "$DATA/hh_harmless_dev.jsonl.gz" --max_samples 180 \
            --eval_fraction 0.3333 --learning_rate 5e-5
    done
fi
