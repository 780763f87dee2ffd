"""A page as a browser makes it."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")


def dom_of(text: str, folder: Path) -> str:
    """The document after its scripts have run; its title holds what they raised, and is empty otherwise.

    The policy of our pages forbids foreign scripts, so errors are watched for by one whose hash is added to it.
    """
    watch = "document.title='';addEventListener('error',e=>{document.title+='ERROR '+e.message});"
    digest = base64.b64encode(hashlib.sha256(watch.encode()).digest()).decode()
    text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1).replace(
        "<style>", f"<script>{watch}</script>\n<style>", 1
    )
    (folder / "watched.html").write_text(text, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=4000"
    return subprocess.run(
        ["chromium", *flags.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
        + [(folder / "watched.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
