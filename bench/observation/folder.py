"""The folder that an observation adds its record to, before and after."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.environment import REPOSITORY
from bench.store import read_records


def check_records(folder: Path) -> None:
    """Raises StoreError where the folder's records cannot be added to: now, not after the training."""
    if (folder / "records.jsonl").exists():
        read_records(folder / "records.jsonl")


def report(folder: Path) -> None:
    """Tables, figures and page, by a process of their own: a training script need not import all that."""
    subprocess.run(  # noqa: S603  fixed arguments, no shell
        [sys.executable, "-m", "analysis.report", str(folder.absolute())], cwd=REPOSITORY, check=False
    )
