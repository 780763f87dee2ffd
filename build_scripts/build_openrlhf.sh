#!/usr/bin/env bash
# Installation for GPU machines: into the active conda or virtual environment, or into a new conda environment "openrlhf".
# Adds flash-attn and bitsandbytes (extra "gpu") to what build_scripts/install.sh installs; flash-attn may compile for long.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
run=()
if [[ -z ${VIRTUAL_ENV:-} && ( -z ${CONDA_PREFIX:-} || ${CONDA_DEFAULT_ENV:-base} == base ) ]]; then
    if ! command -v conda >/dev/null 2>&1; then
        echo "build_openrlhf.sh: expected an active environment, or conda to make one; see https://docs.conda.io" >&2
        exit 1
    fi
    if ! conda env list | grep -q '^openrlhf '; then
        conda create -y -n openrlhf python=3.10
    fi
    run=(conda run --no-capture-output -n openrlhf)
fi

python() {
    ${run[@]+"${run[@]}"} python "$@"
}

torch=$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' "$root/requirements.txt")
python -m pip install packaging wheel ninja 'setuptools>=77'
python -m pip install "$torch"
python -m ninja --version
python -m pip install -r "$root/requirements.txt"
if python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    # Its build needs the torch just installed. A ready wheel for the torch and CUDA at hand saves the compilation.
    python -m pip install --no-build-isolation -e "$root[gpu]"
else
    echo "This torch is a CPU build: flash-attn and bitsandbytes are left out"
    python -m pip install --no-deps -e "$root"
fi
if [[ ${#run[@]} -gt 0 ]]; then
    echo "Done: conda activate openrlhf"
fi
