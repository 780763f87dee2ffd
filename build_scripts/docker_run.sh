#!/usr/bin/env bash
# Open a shell in a container with the project at /openrlhf and its environment installed.
#
#   build_scripts/docker_run.sh [command ...]
#
# IMAGE chooses another image with Python 3.10 to 3.12, such as one with the CUDA compiler for flash-attn.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=${IMAGE:-python:3.11-bookworm}
options=(--rm --shm-size=10g --ulimit memlock=-1 --workdir /openrlhf)
if [[ -t 0 && -t 1 ]]; then
    options+=(--interactive --tty)
fi
if nvidia-smi -L >/dev/null 2>&1; then
    options+=(--gpus all)
fi
mkdir -p "$HOME/.cache"
options+=(--volume "$root:/openrlhf" --volume "$HOME/.cache:/root/.cache")
options+=(--volume openrlhf-venv:/openrlhf/.venv) # the container's own: that of the host stays as it is
if [[ $# -eq 0 ]]; then
    set -- bash
fi
# shellcheck disable=SC2016 # expanded in the container
exec docker run "${options[@]}" "$image" \
    bash -c 'bash build_scripts/install.sh && export PATH=/openrlhf/.venv/bin:$PATH && exec "$@"' bash "$@"
