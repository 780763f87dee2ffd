#!/usr/bin/env bash
# Goal-conditioned reward model on helpful-harmless dialogues. MODEL and DATASET change the defaults.
#
#   run_scripts/train_naturallanguage_rm.sh [slurm] [further flags, which override those below]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

launch ./examples/train_rm.py \
    --save_path ./ckpt/naturallanguage_reward_model \
    --logging_steps 1 \
    --eval_steps 1000 \
    --train_batch_size 64 \
    --micro_train_batch_size 1 \
    --pretrain "${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}" \
    --bf16 \
    --max_epochs 1 \
    --max_len 4096 \
    --zero_stage 3 \
    --learning_rate 1e-5 \
    --dataset "${DATASET:-Anthropic/hh-rlhf}" \
    --dataset_probs 1.0 \
    --contrastive_loss \
    --contrastive_loss_beta 0.5 \
    --unsim_samples 16 \
    --flash_attn \
    --gradient_checkpointing \
    --seed 0 \
    "$@"
