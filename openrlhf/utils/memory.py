"""How the C library treats memory that is freed."""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 256 << 20
LARGEST_KEPT = 32 << 20  # bytes of one piece; what glibc takes on a 64-bit system at most
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB of freed memory at the end of its heap.

    glibc gives it back to the system once a few megabytes are free there. Forward passes on a CPU free and ask for as
    much in every layer, and the system clears each page anew: a fifth of the processor time of scoring with a small
    model. The peak stays what it is. Nothing is done where the user's environment sets this, or without glibc.
    """
    if any(name in os.environ for name in USERS_OWN):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)  # setting one stops glibc from moving the other
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
