#!/usr/bin/env bash
# Goal state of a trained model: mean last hidden state over the chosen responses.
#
#   run_scripts/get_representation.sh [slurm] [further flags, which override those below]
#
# Rated responses:      DATASET=helpsteer.jsonl ... --attribute helpfulness all_categories_good --min_value 3
# A goal per question:  DATASET=completions.jsonl ... --per_question
# A killed run goes on where it was, when it is started again with the same flags.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

run_python ./examples/get_representation.py \
    --dataset-path "${DATASET:-data/openmath_pairs.jsonl}" \
    --reward-model-path "${REWARD_MODEL:-./ckpt/contrastive_reward_model}" \
    --save-dir "${SAVE_DIR:-${REWARD_MODEL:-./ckpt/contrastive_reward_model}-goal}" \
    "$@"
