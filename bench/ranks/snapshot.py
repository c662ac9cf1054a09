"""What CUDA's allocator gave out and took back, in a file for https://pytorch.org/memory_viz."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

MOST_EVENTS = 100_000
"""How many allocations and releases are kept, the last ones; with their stacks 1 KB or more each."""


def keep_history() -> None:
    """Have the allocator remember from now on which Python code asked for what."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")


def snapshot_path(folder: Path, rank: int) -> Path:
    """The file of a rank in its cell's folder."""
    return folder / f"memory_rank_{rank}.pickle"


def write_snapshot(path: Path) -> str | None:
    """The name of the file that was written; None where the disk has no room for it."""
    with suppress(OSError):
        torch.cuda.memory._dump_snapshot(str(path))
        return path.name
    return None
