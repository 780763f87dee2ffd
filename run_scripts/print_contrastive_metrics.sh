#!/usr/bin/env bash
# Print the figures of the scores that eval_contrastive_rm.sh wrote.
#
#   run_scripts/print_contrastive_metrics.sh [slurm] [further flags]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/metrics.py \
    --scored_path "${SCORED:-./results/rm_eval/contrastive_reward_model}" \
    "$@"
