"""Pages of one HTML file that load nothing: the frame, style and helpers they share, and what is their own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.utils.atomic import atomic_write_bytes

_FRAME = Path(__file__).with_name("page_frame")


def fill_page(path: str | Path, folder: Path, parts: Mapping[str, str], packed: Mapping[str, Any]) -> Path:
    """Write a page.

    Args:
        path: HTML file; its folder is made when absent.
        folder: holds page.html, the body's begin and content, in which `{{name}}` stands for a part; style.css and
            script.js, which follow those of the frame.
        parts: HTML by name, `title` among them.
        packed: what the scripts read, plain JSON values.
    Returns:
        The path.
    """
    script = _read(_FRAME / "helpers.js") + _read(folder / "script.js")
    parts = {
        **parts,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": _read(_FRAME / "style.css") + _read(folder / "style.css"),
        "data": _json_for_html(packed),
        "script": script,
    }
    page = _read(_FRAME / "frame.html").replace("{{page}}", _read(folder / "page.html"))
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)  # one pass: texts put in are not read again
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, page.encode("utf-8", "replace"))  # half a surrogate pair in a name becomes ?
    return path


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _json_for_html(content: Any) -> str:
    """JSON of plain ASCII letters that cannot end its <script> element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
