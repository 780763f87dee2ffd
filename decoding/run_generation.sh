#!/usr/bin/env bash
# Guided beam search beside greedy decoding and the votes; by default on the embedded task, after the quickstart.
#
#   decoding/run_generation.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../run_scripts/launch.sh"

run_python ./decoding/generate.py \
    --dt_name "${DT_NAME:-pocket}" \
    --model_name "${POLICY:-pocket}" \
    --input_file "${INPUT_FILE:-test:200}" \
    --output_dir "${OUTPUT_DIR:-./results/decoding}" \
    --reward_model_path "${REWARD_MODEL:-./runs/quickstart/seed-0/contrastive}" \
    --goal_state_path "${GOAL_STATE:-./runs/quickstart/seed-0/goals/contrastive}" \
    --methods greedy sample majority weighted best_of_n beam \
    --beam_size 4 \
    --n_samples 4 \
    --temperature 1.0 \
    --conf_ratio 0.5 \
    --max_tokens 128 \
    --resume \
    "$@"
