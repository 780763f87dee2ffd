#!/usr/bin/env bash
# Check that TRL goes on training from one of our checkpoints, in an environment of its own (.venv-trl).
#
#   build_scripts/check_trl.sh CHECKPOINT
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
checkpoint=$(realpath "${1:?usage: build_scripts/check_trl.sh CHECKPOINT (a folder saved by train_rm)}")
cd "$root"
if [[ ! -f .venv-trl/.ready ]]; then
    "${PYTHON:-python3}" -m venv .venv-trl
    .venv-trl/bin/pip install -q "$(grep '^torch==' requirements.txt)"
    .venv-trl/bin/pip install -q trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 numpy==2.4.6
    touch .venv-trl/.ready
fi
exec .venv-trl/bin/python build_scripts/check_trl.py "$checkpoint"
