#!/usr/bin/env bash
# Checks and figures on one GPU, in at most 8 minutes: parity tests, scoring and training speed, use of the GPU's rate.
#
#   benchmarks/gpu.sh [FOLDER]      writes JSON and logs into FOLDER (default: $OUT, else runs/gpu)
#
# Needs an installed environment: .venv, or PYTHON=the Python of another. PEER_PYTHON adds TRL to the training figures.
# A part that fails or runs out of its time does not stop the others; the script then ends with 1.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(realpath -m "${1:-${OUT:-$root/runs/gpu}}")
cd "$root" || exit 1
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$root/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline PYTHONPATH=$root
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: torch of $PYTHON sees no GPU" >&2
    exit 1
fi
"$PYTHON" - >"$folder/machine.json" <<'PY'
import json, torch, transformers

properties = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": properties.name, "gib": properties.total_memory / 2**30, "torch": torch.__version__,
                  "cuda": torch.version.cuda, "transformers": transformers.__version__}))
PY
cat "$folder/machine.json"

failed=0
part() { # NAME SECONDS COMMAND...: run with a limit, keep the log, show its end
    local name=$1 limit=$2 code=0
    shift 2
    SECONDS=0
    timeout --kill-after=5 "$limit" "$@" >"$folder/$name.log" 2>&1 || code=$?
    echo "== $name: ended with $code after $SECONDS s"
    tail -n 12 "$folder/$name.log"
    ((code == 0)) || failed=1
}

# Limits add up to 465 s.
part tests 180 "$PYTHON" -m pytest -q tests/gpu -p no:cacheprovider --junitxml "$folder/tests.xml"
part score 75 "$PYTHON" benchmarks/bench_score.py --repeats 1 --batch_sizes 32 --json "$folder/score.json"
part train_bf16 130 "$PYTHON" benchmarks/bench_train.py --model 300m --data generated --length 1024 --pairs 192 \
    --batch_size 32 --micro_batch_sizes 16 --batch_tokens 32768 --peer_batches 16 --max_len 2048 --precision bf16 \
    --repeats 1 --profile --json "$folder/train_bf16.json"
part train_float32 80 "$PYTHON" benchmarks/bench_train.py --data pocket --pairs 256 --micro_batch_sizes 32 \
    --peer_batches 32 --repeats 1 --json "$folder/train_float32.json"
exit $failed
