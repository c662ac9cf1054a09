"""Import name of an installed copy: every public name of `bench`, for example `ulysses_ring_bench.observe`.

A name is imported on first use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench import *  # noqa: F403  shows the names of HOMES to editors and mypy

HERE = Path(__file__).resolve().parent
TREE = HERE if (HERE / "bench").is_dir() else HERE.parent
"""Folder that contains our `bench`: this folder in a wheel, its parent in a checkout."""
sys.path.append(str(TREE))


def __getattr__(name: str) -> Any:
    """Import a public name from `bench`.

    Raises:
        ImportError: If `bench` is another project's package.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_another_bench()
    import bench

    return bench.__getattr__(name)


def refuse_another_bench() -> None:
    """Raise ImportError if the imported `bench` is another project's package or folder."""
    import bench

    if not hasattr(bench, "HOMES"):
        raise ImportError(
            f"this process has imported {bench!r}, but ulysses_ring_bench needs its own `bench`:"
            " rename the other one, or use ulysses_ring_bench in another process"
        )
