"""The default sweep where no ranks can share a sequence, as on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.config import AUTO
from bench.environment import Machine
from bench.request import values
from bench.request.choices import Raw
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES


def for_lone_ranks(raws: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """The requests that compare something here, and what was left out; all, where ranks share sequences.

    CPU ranks keep every strategy: they show that the loop works, which one rank does too.
    """
    sharing = {
        name: [raw for raw in raws if raw["strategy"]["name"] == name]
        for name in dict.fromkeys(
            values.choice("strategy", raw["strategy"]["name"], STRATEGIES) for raw in raws
        )
        if STRATEGIES[name].shares_sequences
    }
    cells = (resolve(raw, machine) for each in sharing.values() for raw in each)
    if not sharing or any(cell.cluster.device != "cuda" or cell.sp_degree > 1 for cell in cells):
        return [*raws], None
    alone = [raw for raw in raws if raw["strategy"]["name"] not in sharing]
    kept = [each for raw in alone for each in _with_and_without(raw)]
    note = (
        f"left out: {', '.join(sharing)}, whose ranks share a sequence, and here each has one rank;"
        " mode=replay cluster.world_size=4 compares them on one GPU (docs/replay.md), and"
        " cluster.ranks_per_gpu=4 checks their results there"
    )
    if len(kept) > len(alone):
        note += "; compared instead: local with checkpointing on and off"
    return kept, note


def _with_and_without(raw: Raw) -> Iterator[Raw]:
    """Checkpointing on and off, unless the request says which."""
    if raw["checkpointing"] != AUTO:
        yield raw
        return
    for flag in (True, False):
        yield {**raw, "checkpointing": flag}
