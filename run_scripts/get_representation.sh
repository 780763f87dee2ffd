#!/usr/bin/env bash
# Goal state of a trained model: mean last hidden state over the chosen responses.
#
#   run_scripts/get_representation.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/get_representation.py \
    --dataset-path "${DATASET:-data/openmath_pairs.jsonl}" \
    --reward-model-path "${REWARD_MODEL:-./ckpt/contrastive_reward_model}" \
    --save-dir "${SAVE_DIR:-./ckpt/contrastive_reward_model-goal}" \
    "$@"
