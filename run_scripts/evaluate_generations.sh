#!/usr/bin/env bash
# Evaluate on real generations of many models, sized for a CPU: a reward model that starts from the first layers of
# SmolLM2-135M is trained on GSM8K solutions of 23 models, then scores every file of generations and the pool of
# completions of the held-out questions; figures, report and plots are made.
#
#   DATA=<folder> run_scripts/evaluate_generations.sh
#
# DATA holds gsm8k_pool/{train,validation}.jsonl.gz, generations/{gsm8k,svamp,math}/*.jsonl(.gz) and
# step_level/mr_gsm8k.jsonl. Finished parts are kept: run it again to go on. LAYERS (8), OUT (runs/generations),
# MODELS (contrastive vanilla) and SETS (folders and files under DATA) can be set.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH"
DATA=${DATA:?set DATA to the folder with gsm8k_pool, generations and step_level}
OUT=${OUT:-runs/generations}
LAYERS=${LAYERS:-8}
FULL=${FULL:-models/SmolLM2-135M-Instruct}
START=${START:-models/SmolLM2-$LAYERS-layers}
MODELS=${MODELS:-contrastive vanilla}
SETS=${SETS:-gsm8k_pool/validation.jsonl.gz step_level generations/gsm8k generations/svamp generations/math}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}

[[ -f $FULL/config.json ]] || bash build_scripts/get_small_lm.sh "$FULL"
[[ -f $START/config.json ]] || python build_scripts/truncate_lm.py "$FULL" "$LAYERS" "$START"
mkdir -p "$OUT"
[[ -f $OUT/pool_pairs.jsonl ]] || python -m openrlhf.cli.data_setup --solutions "$DATA/gsm8k_pool/train.jsonl.gz" \
    --pairs_per_question 1 --output "$OUT/pool_pairs.jsonl"

for strategy in $MODELS; do
    model=$OUT/pool-$strategy
    grep -qs '"status": "finished"' "$model/manifest.json" || python examples/train_rm.py --pretrain "$START" \
        --dataset "$OUT/pool_pairs.jsonl" --save_path "$model" --reward_model_strategy "$strategy" \
        --input_template plain --learning_rate 1e-4 --train_batch_size 8 --micro_train_batch_size 4 --max_len 384 \
        --seed 0 --logging_steps 5
    python examples/get_representation.py --dataset "$OUT/pool_pairs.jsonl" --reward_model "$model" \
        --save_dir "$model-goal"
    python examples/eval_rm.py --completions_data_path "$DATA" --benchmarks $SETS --reward_model_path "$model" \
        --goal_state_path "$model-goal" --save_dir "$OUT/scores" --max_len 1024
done
python examples/metrics.py --scored_path "$OUT/scores" --json "$OUT/figures.json" --csv "$OUT/figures.csv" \
    --report "$OUT/report.html" --figures "$OUT/figures"
