"""What is said to somebody whose training runs: one line, and nothing where that cannot be written."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from bench.config import ConfigError


def say(text: str, where: TextIO | None = None) -> None:
    """A line of ours, by default among the warnings; a closed terminal ends no training."""
    with suppress(Exception):
        print(f"bench.observe: {text}", file=where or sys.stderr, flush=True)


def in_one_line(error: Exception) -> str:
    """`KeyError: 'scatter'`, and no more of an error whose text has many lines; only the text of our own."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ConfigError) else f"{type(error).__name__}: {first}".removesuffix(": ")
