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
