#!/usr/bin/env bash
# Environment of what the benchmarks compare with: .venv-peers with TRL, apart from the project's own.
#
#   benchmarks/setup_peers.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [[ -f .venv-peers/.ready ]]; then
    echo "setup_peers.sh: .venv-peers is there"
    exit 0
fi
"${PYTHON:-python3}" -m venv .venv-peers
# torch first and pinned: the others then keep it, whichever build (CPU or CUDA) the package index serves.
.venv-peers/bin/pip install -q torch==2.13.0
.venv-peers/bin/pip install -q trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 numpy==2.4.6
.venv-peers/bin/python -c 'import trl; print("trl", trl.__version__)'
touch .venv-peers/.ready
