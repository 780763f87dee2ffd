"""Freed memory stays with a process that scores."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from openrlhf.models.pretrained import save_reward_model
from openrlhf.utils.memory import USERS_OWN
from tests.tiny import tiny_reward_model, tiny_tokenizer

LOAD = "from openrlhf.cli.reward_checkpoint import find_checkpoint as find; find(sys.argv[1]).load()"
CALL = "from openrlhf.utils.memory import keep_freed_memory; keep_freed_memory()"
# Page faults of 5 rounds that write 20 pieces of 2 MiB and free them, before one of these lines and after it.
PROGRAM = """
import json, resource, sys
import numpy as np

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        pieces = [np.ones(1 << 18) for _ in range(20)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = count_faults()
exec(sys.argv[2])
count_faults()  # what it takes from now on stays
print(json.dumps([first, count_faults()]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_used_again_once_a_checkpoint_is_loaded(tmp_path):
    tokenizer = tiny_tokenizer()
    save_reward_model(tmp_path, tiny_reward_model(), tokenizer, settings={"template": "plain", "max_len": 64})
    pages = 5 * 20 * (2 << 20) // os.sysconf("SC_PAGESIZE")
    inherited = {name: value for name, value in os.environ.items() if name not in USERS_OWN}
    found = []
    users_own = {"MALLOC_TRIM_THRESHOLD_": str(1 << 20)}  # given back sooner still
    for line, own in ((LOAD, {}), (CALL, {}), (CALL, users_own)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), line],
            env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | own,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (before, loaded), (_, called), (_, given_back) = found
    assert before > pages / 2  # else there is nothing to save
    assert max(loaded, called) < pages / 50
    assert given_back > pages / 2
