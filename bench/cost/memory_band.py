"""How far the memory that a rank takes may be from what the formula expects, and why.

Both ends say what a rank needs if all that is not known turns out well, or badly, at once.
"""

from __future__ import annotations

from bench.config import RunConfig
from bench.cost.band import Band
from bench.cost.engine_memory import ENGINE_MEMORY
from bench.cost.memory import MemoryNeed
from bench.labels import GIB

FORMULA_SHARE = 0.03
"""Of tensors: nine in ten of the measured peaks of CPU ranks in results/reference/ are as near to the formula
(docs/published_memory.md)."""
CONTEXT_GIB = (0.5, 2.5)
"""CUDA's context and libraries take 0.5 to 0.7 GiB by public out-of-memory messages; NCCL's buffers, for each
group of ranks that share a channel, are not measured by us: 2 GiB are left for them."""
FRAGMENTATION_SHARE = 0.15
"""Of tensors: what the caching allocator holds and cannot use, on average over eight models that are trained
with recomputation, sharding and offloading (GMLake, arXiv:2401.08156); none of it with luck."""


def allocated_band(cell: RunConfig, need: MemoryNeed) -> Band:
    """Bytes of tensors at the fullest moment."""
    expected = need.allocated
    engine = ENGINE_MEMORY[cell.engine](cell)
    spread = round(FORMULA_SHARE * expected)
    spared = engine.gathered - min(engine.gathered, engine.least_gathered)
    beyond = max(engine.gathered, engine.most_gathered) - engine.gathered
    return Band(expected - spread - spared, expected, expected + spread + beyond)


def needed_band(cell: RunConfig, need: MemoryNeed) -> Band:
    """The same with what the process takes beside tensors, and what its allocator cannot use."""
    allocated = allocated_band(cell, need)
    if cell.cluster.device != "cuda":
        return allocated
    least, most = (round(gib * GIB) for gib in CONTEXT_GIB)
    high = round(allocated.high * (1 + FRAGMENTATION_SHARE)) + most
    return Band(allocated.low + least, need.total, high)
