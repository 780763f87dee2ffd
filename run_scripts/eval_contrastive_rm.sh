#!/usr/bin/env bash
# Score generations of seven benchmarks with the goal-conditioned model.
#
#   run_scripts/eval_contrastive_rm.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/eval_rm.py \
    --completions_data_path "${COMPLETIONS:-data/generations}" \
    --reward_model_path "${REWARD_MODEL:-./ckpt/contrastive_reward_model}" \
    --save_dir "${SAVE_DIR:-./results/rm_eval}" \
    --filter_threshold 0.0 \
    --benchmarks gsm8k math gsm-hard mawps asdiv algebra222 svamp \
    --goal_state_path "${GOAL_STATE:-${REWARD_MODEL:-./ckpt/contrastive_reward_model}-goal}" \
    "$@"
