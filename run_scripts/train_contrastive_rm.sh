#!/usr/bin/env bash
# Goal-conditioned reward model of the paper. MODEL and DATASET change the defaults.
#
#   run_scripts/train_contrastive_rm.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch ./examples/train_rm.py \
    --save_path ./ckpt/contrastive_reward_model \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --train_batch_size 64 \
    --micro_train_batch_size 1 \
    --pretrain "${MODEL:-nvidia/OpenMath-CodeLlama-7b-Python-hf}" \
    --bf16 \
    --max_epochs 1 \
    --max_len 2048 \
    --zero_stage 3 \
    --learning_rate 9e-6 \
    --dataset "${DATASET:-data/openmath_pairs.jsonl}" \
    --dataset_probs 1.0 \
    --flash_attn \
    --gradient_checkpointing \
    --reward_model_strategy contrastive \
    --contrastive_strategy cosine \
    --contrastive_loss_beta 0.5 \
    --unsim_samples 16 \
    --value_head_strategy linear \
    --source_state_percentile 0 \
    --goal_state_percentile 0 \
    "$@"
