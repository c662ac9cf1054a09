"""The files that a rank leaves in its cell's folder: its log, and a report or a failure."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LOG_TAIL_BYTES = 8000
"""Enough for the reason that NCCL's watchdog prints: up to 4,000 bytes of C++ stacks follow it."""


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / f"rank_{rank}.log"


def report_path(folder: Path, rank: int) -> Path:
    """What a rank writes when it has done everything; an exit code of 0 does not prove that."""
    return folder / f"rank_{rank}.report.json"


def failure_path(folder: Path, rank: int) -> Path:
    """What a rank writes when an error ended it."""
    return folder / f"rank_{rank}.failure.json"


def read_file(path: Path) -> dict[str, Any] | None:
    """A file's content; None where there is none."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def take_file(path: Path) -> dict[str, Any] | None:
    """Read a rank's file and remove it: its content goes into the record."""
    content = read_file(path)
    path.unlink(missing_ok=True)
    return content


def tail_of(path: Path) -> str:
    """The end of a log, however long it is; empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode(errors="replace")
