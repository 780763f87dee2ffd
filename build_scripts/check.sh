#!/usr/bin/env bash
# Format, lint and structure of the tree; needs the environment of build_scripts/install.sh --dev.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=$root/.venv/bin/python
if ! "$python" -m ruff --version >/dev/null 2>&1; then
    echo "check.sh: ruff is missing in .venv; run build_scripts/install.sh --dev" >&2
    exit 1
fi

failed=0
"$python" -m ruff format --check . || failed=1
"$python" -m ruff check . || failed=1
"$python" build_scripts/check_tree.py || failed=1
exit $failed
