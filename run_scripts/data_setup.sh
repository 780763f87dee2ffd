#!/usr/bin/env bash
# Build the preference file from labelled solutions and lay generations out by benchmark; works from any folder.
#
#   run_scripts/data_setup.sh [slurm] [flags of openrlhf.cli.data_setup, or --help]
#
# Without flags: pairs from OpenMathInstruct-1 on the hub (several GB), written to data/openmath_pairs.jsonl.
# `slurm` as first argument runs the same through srun.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
launcher=()
if [[ "${1-}" == slurm ]]; then
    launcher=(srun)
    shift
fi
if [[ ! -x "$root/.venv/bin/data_setup" ]]; then
    bash "$root/build_scripts/install.sh"
fi
if [[ $# -eq 0 ]]; then
    set -- --solutions nvidia/OpenMathInstruct-1 --output "$root/data/openmath_pairs.jsonl" --pairs_per_question 4
fi
exec ${launcher[@]+"${launcher[@]}"} "$root/.venv/bin/data_setup" "$@"
