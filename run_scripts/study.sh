#!/usr/bin/env bash
# A declared grid of reward models: make .venv, install, train, score and compare them, with tables and plots.
#
#   run_scripts/study.sh --study examples/studies/pocket.json [flags of openrlhf.cli.study, see --help]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/build_scripts/install.sh"
# The installed program, not `python -m`: that would take a folder "datasets" of the current folder for the package.
exec "$root/.venv/bin/study" "$@"
