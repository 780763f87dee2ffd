#!/usr/bin/env bash
# Print the figures of the scores that eval_baseline_rm.sh wrote.
#
#   run_scripts/print_baseline_metrics.sh [slurm] [further flags]
#   SCORED=DIR run_scripts/print_baseline_metrics.sh --report report.html --json all.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/metrics.py \
    --scored_path "${SCORED:-./results/rm_eval/baseline_reward_model}" \
    "$@"
