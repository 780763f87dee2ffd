#!/usr/bin/env bash
# Install what the tests need, check the tree, and run the tests; works from any folder.
#
#   run_scripts/test.sh [pytest arguments]     paths in them count from the project root
#
# Tests that need a GPU run only when named: run_scripts/test.sh tests/gpu
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash build_scripts/install.sh --dev
bash build_scripts/check.sh

export HF_HUB_OFFLINE=1 WANDB_MODE=offline
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models of the tests are too small for more
if ! nvidia-smi -L >/dev/null 2>&1; then
    export DS_ACCELERATOR=cpu
fi
if [[ " $* " != *tests/gpu* ]]; then
    set -- --ignore=tests/gpu "$@"
fi
exec .venv/bin/python -m pytest "$@"
