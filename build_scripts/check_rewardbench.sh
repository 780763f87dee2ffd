#!/usr/bin/env bash
# Check that our RewardBench scores are those of the rewardbench package, in an environment of its own
# (.venv-rewardbench).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${REWARDBENCH_VENV:-.venv-rewardbench}
if [[ ! -f $environment/.ready ]]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q "$(grep '^torch==' requirements.txt)"
    # What the package's result functions import; its own requirements would bring bitsandbytes, wandb and more.
    "$environment/bin/pip" install -q transformers==4.51.0 datasets==3.6.0 accelerate==1.6.0 pandas==2.3.3 \
        numpy==2.4.6 sentencepiece==0.2.3 "$(grep '^torch==' requirements.txt)"
    "$environment/bin/pip" install -q --no-deps rewardbench==0.1.4 fschat==0.2.36 trl==0.17.0
    touch "$environment/.ready"
fi
exec "$environment/bin/python" build_scripts/check_rewardbench.py
