#!/usr/bin/env bash
# Score generations of seven benchmarks with the baseline model.
#
#   run_scripts/eval_baseline_rm.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/eval_rm.py \
    --completions_data_path "${COMPLETIONS:-data/generations}" \
    --reward_model_path "${REWARD_MODEL:-./ckpt/baseline_reward_model}" \
    --save_dir "${SAVE_DIR:-./results/rm_eval}" \
    --filter_threshold 0.0 \
    --benchmarks gsm8k math gsm-hard mawps asdiv algebra222 svamp \
    --vanilla \
    "$@"
