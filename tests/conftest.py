"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with real data: OPENRLHF_TEST_DATA, or ../shared/data beside the checkout; skips where it is absent."""
    named = os.environ.get("OPENRLHF_TEST_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set OPENRLHF_TEST_DATA to run this test")
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folder of a tiny language model to train from."""
    from tests.tiny import save_tiny_causal_lm

    return save_tiny_causal_lm(tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """File of 84 pairs; tests of other data have a fixture of their own by this name."""
    from tests.runs import write_pairs

    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 84)
