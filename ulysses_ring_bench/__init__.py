"""Ulysses against Ring Attention, measured: the name under which other code imports an installed copy.

Every public name of `bench` is here, as in `ulysses_ring_bench.observe(...)`, imported when it is first used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench import *  # noqa: F403  the names of HOMES, as an editor and mypy find them there

HERE = Path(__file__).resolve().parent
TREE = HERE if (HERE / "bench").is_dir() else HERE.parent
"""The folder that holds our `bench`: a wheel puts it in here, a checkout has it beside this folder."""
sys.path.append(str(TREE))


def __getattr__(name: str) -> Any:
    """A public name of `bench`; raises ImportError where `bench` is somebody else's."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_another_bench()
    import bench

    return bench.__getattr__(name)


def refuse_another_bench() -> None:
    """Raises ImportError where the script's folder, or another package, has a `bench` of its own."""
    import bench

    if not hasattr(bench, "HOMES"):
        raise ImportError(
            f"this process has imported {bench!r}, but ulysses_ring_bench needs its own `bench`:"
            " rename the other one, or use ulysses_ring_bench in another process"
        )
