#!/usr/bin/env bash
# Rebuild examples/pocket, the policy of the embedded task: tokenizer, training on generated problems, measurement.
#
#   run_scripts/build_pocket_policy.sh [flags of openrlhf.cli.train_sft, which override those below]
#
# About 15 minutes on 2 cores. OUTPUT names another folder than examples/pocket.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [[ ! -x .venv/bin/python ]]; then
    bash build_scripts/install.sh
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}
work=build/pocket

.venv/bin/python -m openrlhf.cli.build_pocket --stage start --save_path "$work/start"
.venv/bin/python -m openrlhf.cli.train_sft \
    --pretrain "$work/start" \
    --dataset pocket \
    --max_samples 128000 \
    --max_epochs 1 \
    --train_batch_size 64 \
    --micro_train_batch_size 16 \
    --learning_rate 3e-3 \
    --min_lr_ratio 0.05 \
    --max_len 256 \
    --logging_steps 50 \
    --eval_steps 1000 \
    --save_path "$work/sft" \
    "$@"
.venv/bin/python -m openrlhf.cli.build_pocket --stage finish --policy_path "$work/sft" \
    --save_path "${OUTPUT:-examples/pocket}"
