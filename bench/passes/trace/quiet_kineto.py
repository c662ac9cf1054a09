"""Keeps what kineto says of every profiler off a terminal that is somebody else's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2
KINETO = re.compile(rb"USDT:[^\n]*\bprofiler_(?:start|stop)\n?")
"""Written by C++ to the descriptor at each start and stop; no variable of the environment changes it."""


@contextmanager
def without_kineto_lines() -> Iterator[None]:
    """Take kineto's lines out of what the process writes to stderr meanwhile; all else follows at the end."""
    try:
        sys.stderr.flush()
        kept, caught = os.dup(STDERR), os.memfd_create("stderr")
    except (OSError, AttributeError, ValueError):  # closed, or replaced, or not Linux: as it is without this
        yield
        return
    os.dup2(caught, STDERR)
    try:
        yield
    finally:
        os.dup2(kept, STDERR)
        written = KINETO.sub(b"", os.pread(caught, os.fstat(caught).st_size, 0))
        os.close(caught)
        with os.fdopen(kept, "wb") as stderr:
            stderr.write(written)
