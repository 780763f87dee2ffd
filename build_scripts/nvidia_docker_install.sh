#!/usr/bin/env bash
# Let Docker use NVIDIA GPUs on Debian or Ubuntu: installs Docker where it is missing, and NVIDIA's container toolkit.
# Needs root (or sudo) and an installed NVIDIA driver.
set -euo pipefail

sudo=()
if [[ $(id -u) != 0 ]]; then
    sudo=(sudo)
fi
as_root() {
    ${sudo[@]+"${sudo[@]}"} "$@"
}

if ! nvidia-smi -L; then
    echo "nvidia_docker_install.sh: nvidia-smi finds no GPU; install the NVIDIA driver first" >&2
    exit 1
fi
as_root apt-get update
as_root apt-get install -y ca-certificates curl gnupg
if ! command -v docker >/dev/null 2>&1; then
    as_root apt-get install -y docker.io
fi

source=https://nvidia.github.io/libnvidia-container
keyring=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
curl -fsSL "$source/gpgkey" | as_root gpg --yes --dearmor -o "$keyring"
curl -fsSL "$source/stable/deb/nvidia-container-toolkit.list" |
    sed "s#deb https://#deb [signed-by=$keyring] https://#g" |
    as_root tee /etc/apt/sources.list.d/nvidia-container-toolkit.list >/dev/null
as_root apt-get update
as_root apt-get install -y nvidia-container-toolkit
as_root nvidia-ctk runtime configure --runtime=docker
if command -v systemctl >/dev/null 2>&1; then
    as_root systemctl restart docker
else
    as_root service docker restart
fi
as_root docker run --rm --gpus all ubuntu nvidia-smi
