"""The C library's heap, kept as it is: what a case frees is there for its next call."""

from __future__ import annotations

import ctypes

from bench.labels import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**31 - 1
_MOST_MMAP_THRESHOLD_BYTES = 32 * MIB
"""The C library refuses more; see mallopt(3)."""


def keep_freed_memory() -> None:
    """Give nothing back to the kernel but blocks beyond 32 MiB.

    Otherwise the first write to a page, which is measured by itself, is a part of some sizes' calls and not
    of others'.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
