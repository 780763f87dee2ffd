"""Reward code by its tests, each program in a sandbox (time, memory, processes, network and files limited).

The label of a sample is JSON, a text or already parsed:
    ["assert double(2) == 4", ...]              statements run behind the program, in its namespace; or one text of them
    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}    what the program prints for each standard input
The reward is the share of tests passed, minus 0.1 where the response holds no program. Use:
--remote_rm_url examples/python/code_reward_func.py --label_key tests
"""

import json
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor

import torch

from openrlhf.rewards.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(time_s=5, memory_bytes=512 << 20)
NO_PROGRAM = -0.1
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Runs behind the program. The word and the tests come through standard input once the program is done, so a program
# that only ends early, prints "passed" or replaces `print` does not pass.
HARNESS = """
def _run_tests():
    import json, os, sys
    word, tests = json.loads(sys.stdin.readline())
    passed = 0
    for test in tests:
        try:
            exec(test, globals())
            passed += 1
        except BaseException as error:
            sys.stderr.write(f"{test}: {error!r}\\n")
    os.write(1, f"\\n{word} {passed}\\n".encode())
_run_tests()
"""


def reward_func(queries, prompts, labels, **kwargs):
    """Run the program of each response; see the module for labels."""
    responses = [
        query[len(prompt) :] if query.startswith(prompt) else query
        for query, prompt in zip(queries, prompts, strict=True)
    ]
    programs = [find_program(response) for response in responses]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the sandbox runs as many at once as there are processors
        shares = list(pool.map(share_passed, programs, labels))
    rewards = torch.tensor([NO_PROGRAM if share is None else share for share in shares])
    return {
        "rewards": rewards,
        "scores": (rewards == 1).float(),
        "extra_logs": {
            "all_tests_passed": (rewards == 1).float().mean(),
            "has_program": torch.tensor([float(share is not None) for share in shares]).mean(),
        },
    }


def find_program(response):
    """The last fenced block, else the whole text where it is Python that defines or prints something; else None."""
    blocks = FENCE.findall(response)
    if blocks:
        return blocks[-1]
    text = re.sub(r"<[^<>\s]{1,20}>\s*$", "", response)  # a special token at the end
    return text if re.search(r"^(def|class|import|from|print)\b", text, re.MULTILINE) else None


def share_passed(program, label):
    """Share of the label's tests that a program passes, in [0, 1]; None without a program."""
    tests = json.loads(label) if isinstance(label, str) and label.lstrip()[:1] in ("[", "{") else label
    if isinstance(tests, str):
        tests = [tests] if tests.strip() else []
    if not tests or (isinstance(tests, dict) and not tests["inputs"]):
        raise ValueError(f"a sample without tests cannot be rewarded; got the label {label!r}")
    if program is None:
        return None
    if isinstance(tests, dict):
        results = [run_python(program, stdin=given, limits=LIMITS) for given in tests["inputs"]]
        right = [
            result.ok and result.stdout.split() == expected.split()
            for result, expected in zip(results, tests["outputs"], strict=True)
        ]
        return sum(right) / len(right)
    word = secrets.token_hex(16)
    result = run_python(program + HARNESS, stdin=json.dumps([word, tests]) + "\n", limits=LIMITS)
    told = re.search(rf"^{word} (\d+)$", result.stdout, re.MULTILINE)
    return int(told[1]) / len(tests) if told else 0.0
