"""Choices that the requests of a sweep leave open, made once for all of its cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.common.environment import Machine
from bench.config import AUTO, NOT_USED
from bench.request import values
from bench.request.choices import Raw, read_option
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.training.engines import DEFAULT_ENGINE
from bench.training.trainer_facts import is_stack


def for_lone_ranks(raws: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """Return the requests that compare something where no ranks share a sequence, and a note of the others.

    All are returned where ranks share sequences. CPU ranks keep every strategy: they show that the loop
    works, which one rank does too.
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
    """Yield the request with checkpointing on and off, unless it says which."""
    if raw["checkpointing"] != AUTO:
        yield raw
        return
    for flag in (True, False):
        yield {**raw, "checkpointing": flag}


def with_one_engine(raws: Sequence[Raw], machine: Machine) -> list[Raw]:
    """Return the requests with the same engine for every `engine=auto`, where one cannot take DEFAULT_ENGINE.

    Speeds are compared under equal engines. Cells that do not run under that engine keep their own choice.
    """
    left_open = [raw for raw in raws if raw["engine"]["name"] == AUTO]
    if not any(is_stack(raw["trainer"]["name"]) or raw["offload"]["optimizer"] for raw in left_open):
        return [*raws]
    names = (resolve(raw, machine).engine.name for raw in left_open)
    other = next((name for name in names if name not in (DEFAULT_ENGINE, NOT_USED)), None)
    if other is None:
        return [*raws]
    option = read_option("engine", other)

    def with_other(raw: Raw) -> Raw:
        asked = {**raw, "engine": {**option, "leaf": raw["engine"]["leaf"]}}
        return asked if refusal(resolve(asked, machine)) is None else raw

    return [with_other(raw) if raw["engine"]["name"] == AUTO else raw for raw in raws]
