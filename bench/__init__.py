"""Benchmark of Ulysses against Ring Attention: the public interface, whose names and signatures are stable.

Strategy packages, observed training loops and readers of records import from `bench` only, as the module that
defines a name may change. An installed wheel offers the same names as `ulysses_ring_bench`. Modules of this
project never import from `bench` itself. A name is imported on first use, because planning a sweep reads the
facts of strategies and must not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.attention.kernels import Kernel as Kernel
    from bench.attention.kernels import kernel_backward as kernel_backward
    from bench.attention.kernels import kernel_forward as kernel_forward
    from bench.attention.layouts import EVERYTHING as EVERYTHING
    from bench.attention.layouts import LAYOUTS as LAYOUTS
    from bench.attention.layouts import Tile as Tile
    from bench.attention.merge import Partial as Partial
    from bench.config import Cell as Cell
    from bench.config import ConfigError as ConfigError
    from bench.extras.observe import ObserveCallback as ObserveCallback
    from bench.extras.observe import observe as observe
    from bench.extras.probe import probe as probe
    from bench.record.store import read_records as read_records
    from bench.strategies.facts import CallMemory as CallMemory
    from bench.strategies.facts import ScheduledFacts as ScheduledFacts
    from bench.strategies.facts import StrategyFacts as StrategyFacts
    from bench.strategies.facts import activation_bytes as activation_bytes
    from bench.strategies.facts import backwards_per_step as backwards_per_step
    from bench.strategies.facts import forwards_per_step as forwards_per_step
    from bench.strategies.options import Flag as Flag
    from bench.strategies.options import WholeNumber as WholeNumber
    from bench.strategies.plot_style import PlotStyle as PlotStyle
    from bench.strategies.schedule import Block as Block
    from bench.strategies.schedule import Communication as Communication
    from bench.strategies.schedule import Schedule as Schedule
    from bench.strategies.schedule import Stage as Stage
    from bench.strategies.schedule import ring_blocks as ring_blocks
    from bench.strategies.strategy import Strategy as Strategy

HOMES: Mapping[str, str] = {
    name: home
    for home, names in {
        "bench.attention.kernels": ("Kernel", "kernel_backward", "kernel_forward"),
        "bench.attention.layouts": ("EVERYTHING", "LAYOUTS", "Tile"),
        "bench.attention.merge": ("Partial",),
        "bench.config": ("ConfigError", "Cell"),
        "bench.extras.observe": ("ObserveCallback", "observe"),
        "bench.extras.probe": ("probe",),
        "bench.record.store": ("read_records",),
        "bench.strategies.facts": (
            *("CallMemory", "StrategyFacts", "ScheduledFacts"),
            *("activation_bytes", "backwards_per_step", "forwards_per_step"),
        ),
        "bench.strategies.options": ("Flag", "WholeNumber"),
        "bench.strategies.plot_style": ("PlotStyle",),
        "bench.strategies.schedule": ("Block", "Communication", "Schedule", "Stage", "ring_blocks"),
        "bench.strategies.strategy": ("Strategy",),
    }.items()
    for name in names
}
"""Module that defines each public name."""
__all__ = tuple(HOMES)


def __dir__() -> list[str]:
    """Return the attributes of the module and all public names, imported or not."""
    return sorted({*globals(), *HOMES})


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in HOMES:
        raise AttributeError(f"module 'bench' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)
