#!/usr/bin/env bash
# Check that transformers 4.51.0 gives the same tokens and rewards for our checkpoints, in an environment of its own
# (.venv-tf4): for tiny models of several families and rotary scalings, and for the checkpoints named.
# TRANSFORMERS4=4.57.6 takes that version, in .venv-tf4-4.57.6.
#
#   build_scripts/check_transformers4.sh [CHECKPOINT ...]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
checkpoints=()
for name in "$@"; do
    checkpoints+=("$(realpath -e "$name")")
done
cd "$root"
if [[ ! -x .venv/bin/python ]]; then
    echo "check_transformers4.sh: .venv is missing; run build_scripts/install.sh" >&2
    exit 1
fi
version=${TRANSFORMERS4:-4.51.0}
environment=.venv-tf4${TRANSFORMERS4:+-$TRANSFORMERS4}
if [[ ! -f $environment/.ready ]]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q "$(grep '^torch==' requirements.txt)"
    "$environment/bin/pip" install -q "transformers==$version" accelerate==1.15.0 'numpy<2.4'
    touch "$environment/.ready"
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$root
.venv/bin/python build_scripts/check_transformers4.py score "$folder" "${checkpoints[@]}"
"$environment/bin/python" build_scripts/check_transformers4.py compare "$folder"
