"""The structure checks find what they are for."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "build_scripts" / "check_tree.py"
spec = importlib.util.spec_from_file_location("check_tree", SCRIPT)
check_tree = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_tree)


def put(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("openrlhf/datasets/a.py", "from openrlhf.models import policy", "datasets must not import openrlhf.models"),
        ("openrlhf/utils/a.py", "def f():\n    import openrlhf.cli", "openrlhf.utils must not import openrlhf.cli"),
        ("openrlhf/utils/a.py", "from ..trainer import engine", "openrlhf.utils must not import openrlhf.trainer"),
        ("openrlhf/utils/__init__.py", "from ..rewards import grading", "utils must not import openrlhf.rewards"),
        ("openrlhf/utils/__init__.py", "def f():\n    from openrlhf.rewards import grading", None),
        ("openrlhf/trainer/a.py", "from openrlhf import models, utils", None),
        ("openrlhf/models/a.py", "from openrlhf import cli", "openrlhf.models must not import openrlhf.cli"),
        ("openrlhf/trainer/a.py", "def f():\n    import torch.distributed as dist", "only openrlhf/trainer"),
        ("openrlhf/trainer/a.py", "from torch import distributed", "only openrlhf/trainer/deepspeed_engine.py"),
        ("openrlhf/trainer/deepspeed_engine.py", "import deepspeed", None),
        ("openrlhf/utils/a.py", "import wandb", "must be imported inside a function"),
        ("openrlhf/utils/a.py", "def f():\n    import wandb", None),
        ("openrlhf/cli/a.py", "from decoding import beam", "must not import decoding"),
        ("examples/a.py", "from openrlhf.cli import train_rm\nimport torch.distributed", None),
    ],
)  # fmt: skip
def test_layers(tmp_path, name, text, fault):
    faults = check_tree.check_layers([put(tmp_path, name, text)], tmp_path)
    assert len(faults) == (fault is not None)
    if fault:
        assert faults[0].startswith(f"{name}:") and fault in faults[0]


def test_a_module_that_brings_in_a_heavy_package_or_does_not_load_is_named(tmp_path):
    files = [
        put(tmp_path, "openrlhf/__init__.py", ""),
        put(tmp_path, "openrlhf/utils/__init__.py", ""),
        put(tmp_path, "openrlhf/utils/a.py", "import openrlhf.utils.b"),
        put(tmp_path, "openrlhf/utils/b.py", "import sys\nsys.modules['ray'] = sys"),
        put(tmp_path, "openrlhf/utils/c.py", "import no_such_package"),
        put(tmp_path, "openrlhf/utils/d.py", ""),
    ]
    assert check_tree.check_light_imports(files, tmp_path) == [
        "openrlhf.utils.a: importing it brings in ['ray']",
        "openrlhf.utils.c: import fails: ModuleNotFoundError: No module named 'no_such_package'",
    ]


def test_shell_and_text(tmp_path):
    good = put(tmp_path, "good.sh", "echo a \\\n    b\n")
    broken = put(tmp_path, "broken", "#!/usr/bin/env bash\nif true; then\n")
    assert [fault.split(":")[0] for fault in check_tree.check_shell([good, broken], tmp_path)] == ["broken"]
    blank = put(tmp_path, "blank.md", "deepspeed train.py \\ \n  --flag\n")
    private = put(
        tmp_path, "private.py", "path = '/home/" + "somebody/x'\nfree = 'nvidia-curand==10.3.2.106 127.0.0.1'\n"
    )
    assert check_tree.check_text([good, blank, private], tmp_path) == [
        "blank.md:1: blanks after the closing backslash",
        "private.py:1: private text '/home/" + "somebody/'",
    ]


def test_documents(tmp_path):
    put(tmp_path, "openrlhf/models/losses.py", "NAMES = {'sigmoid': 1}\ndef bradley_terry_loss(): ...\n")
    put(tmp_path, "docs/other.md", "# The first heading, really\n")
    text = (
        "[good](other.md) [anchor](other.md#the-first-heading-really) [web](https://example.org/x) `docs/other.md`\n"
        "openrlhf.models.losses openrlhf.models.losses.bradley_terry_loss openrlhf.models\n"
        "[bad](absent.md)\n"
        "[bad](other.md#second)\n"
        "openrlhf.models.losses.log_exp_loss\n"
        "`openrlhf/models/absent.py`\n"
    )
    path = put(tmp_path, "docs/page.md", text)
    assert check_tree.check_documents([path], tmp_path) == [
        "docs/page.md:3: the link absent.md leads nowhere",
        "docs/page.md:4: no heading for the link other.md#second",
        "docs/page.md:5: there is no openrlhf.models.losses.log_exp_loss",
        "docs/page.md:6: there is no openrlhf/models/absent.py",
    ]
