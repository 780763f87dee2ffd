#!/usr/bin/env bash
# Make .venv in the project root and install the project into it. A second run that finds nothing changed ends at once.
#
#   build_scripts/install.sh [--dev]
#
# --dev adds the tools of the tests. PYTHON chooses the interpreter (3.10 to 3.12), as in PYTHON=python3.12.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.openrlhf-install
dev=0
for argument in "$@"; do
    case $argument in
        --dev) dev=1 ;;
        *)
            echo "install.sh: unknown argument '$argument'; usage: build_scripts/install.sh [--dev]" >&2
            exit 2
            ;;
    esac
done

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        if supported "$PYTHON"; then
            echo "$PYTHON"
            return
        fi
        echo "install.sh: PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12 ($("$PYTHON" --version 2>&1 || true))" >&2
        return 1
    fi
    for candidate in python3 python3.11 python3.12 python3.10 python; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "install.sh: no Python 3.10, 3.11 or 3.12 found (python3: $({ python3 --version || echo missing; } 2>/dev/null));" \
        "install one and name it, as in PYTHON=/path/to/python3.11" >&2
    return 1
}

# What decides the content of the environment.
fingerprint() {
    cat "$root/requirements.txt" "$root/pyproject.toml" | cksum
}

# Three lines: the project's folder (programs in .venv/bin name it), the fingerprint, and what is installed:
# "core", or "core dev", which serves both.
wanted=core
[[ $dev == 1 ]] && wanted="core dev"
clear=0
if [[ -f $stamp ]]; then
    { read -r stamped_root && read -r stamped_print && read -r installed; } <"$stamp" || installed=
    [[ ${stamped_root:-} == "$root" ]] || clear=1
    if [[ $clear == 0 && -x $venv/bin/python && $stamped_print == "$(fingerprint)" && $installed == "$wanted"* ]]; then
        exit 0
    fi
fi

# One installation at a time; a second one waits and then finds the work done.
if command -v flock >/dev/null 2>&1 && [[ -z ${OPENRLHF_INSTALL_LOCKED:-} ]]; then
    export OPENRLHF_INSTALL_LOCKED=1
    exec flock "$root/build_scripts/install.sh" bash "$root/build_scripts/install.sh" "$@"
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

if [[ $clear == 1 ]] || ! supported "$venv/bin/python" || ! pip --version >/dev/null 2>&1; then
    python=$(find_python)
    if [[ -e $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv" 2>&1) ]]; then
        echo "install.sh: $venv exists and is not a virtual environment; move it away and run this again" >&2
        exit 1
    fi
    echo "Making $venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$venv" || {
        echo "install.sh: '$python -m venv' failed; on Debian and Ubuntu its package is python3-venv" >&2
        exit 1
    }
fi

rm -f "$stamp" # written again at the very end: an installation cut short is taken up by the next run
torch=$(sed -n 's/^\(torch==[^ ;#]*\).*/\1/p' "$root/requirements.txt")
if [[ -z $torch ]]; then
    echo "install.sh: expected a line torch==VERSION in $root/requirements.txt" >&2
    exit 1
fi
echo "Installing $torch, then the packages of requirements.txt"
pip install "$torch"
pip install -r "$root/requirements.txt"
if [[ $dev == 1 ]]; then
    pip install -e "$root[dev]"
else
    pip install --no-deps -e "$root"
fi
printf '%s\n' "$root" "$(fingerprint)" "$wanted" >"$stamp"
