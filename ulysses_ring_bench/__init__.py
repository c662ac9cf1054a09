"""Ulysses against Ring Attention, measured: the one name under which an installed copy is imported.

Everything that `bench` offers is here: `ulysses_ring_bench.observe(...)`. A script beside which somebody's
own folder `bench/` or `analysis/` lies gets that from `import bench`, and ours from here. Where `bench` is
ours both names give the same objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ulysses_ring_bench.own_modules import own_module

if TYPE_CHECKING:
    from bench import *  # noqa: F403  the names of HOMES, as an editor and mypy find them there


def __getattr__(name: str) -> Any:
    """A public name of `bench`, imported when it is first used."""
    if name.startswith("_") or name not in own_module("bench").HOMES:
        raise AttributeError(f"module 'ulysses_ring_bench' has no attribute {name!r}")
    return getattr(own_module("bench"), name)


def __dir__() -> list[str]:
    return sorted(own_module("bench").HOMES)
