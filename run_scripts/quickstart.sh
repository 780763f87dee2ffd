#!/usr/bin/env bash
# The main job on the embedded task: make .venv, install, train and compare a vanilla and a contrastive reward model.
#
#   run_scripts/quickstart.sh [flags of openrlhf.cli.quickstart, such as --seeds 0,1,2 or --help]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/build_scripts/install.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}
# The installed program, not `python -m`: that would take a folder "datasets" of the current folder for the package.
exec "$root/.venv/bin/quickstart" "$@"
