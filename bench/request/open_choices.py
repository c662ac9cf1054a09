"""Choices that a request leaves open and that are made for all cells of a sweep together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.common.environment import Machine
from bench.config import AUTO, NOT_USED
from bench.request import values
from bench.request.choices import Raw, read_option
from bench.request.legality import refusal
from bench.request.resolve import refuse_unknown_keys, resolve
from bench.strategies import STRATEGIES
from bench.training.engines import DEFAULT_ENGINE
from bench.training.trainer_facts import is_stack


def without_sequence_sharing(raws: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """Return the requests without strategies that share sequences if no ranks share one, and a note on them.

    The remaining requests, those for `local`, are then made with checkpointing on and off. The requests are
    unchanged, and the note is None, if ranks share sequences, or run on the CPU: CPU ranks show that the code
    works, for which one rank is enough.
    """
    sharing = {  # requests by the strategies that share sequences
        name: [raw for raw in raws if raw["strategy"]["name"] == name]
        for name in dict.fromkeys(
            values.choice("strategy", raw["strategy"]["name"], STRATEGIES) for raw in raws
        )
        if STRATEGIES[name].shares_sequences
    }
    cells = (resolve(raw, machine) for group in sharing.values() for raw in group)
    if not sharing or any(cell.cluster.device != "cuda" or cell.sp_degree > 1 for cell in cells):
        return [*raws], None
    alone = [raw for raw in raws if raw["strategy"]["name"] not in sharing]
    kept = [request for raw in alone for request in _with_both_checkpointings(raw)]
    note = (
        f"left out: {', '.join(sharing)}, because with one rank they have no sequence to share;"
        " mode=replay cluster.world_size=4 compares their speed on one GPU (docs/replay.md), and"
        " cluster.ranks_per_gpu=4 checks their results there"
    )
    if len(kept) > len(alone):
        note += "; the sweep compares local with checkpointing on and off"
    return kept, note


def _with_both_checkpointings(raw: Raw) -> Iterator[Raw]:
    """Yield the request with checkpointing on and with it off, or unchanged if it sets checkpointing."""
    if raw["checkpointing"] != AUTO:
        yield raw
        return
    for flag in (True, False):
        yield {**raw, "checkpointing": flag}


def with_one_engine(raws: Sequence[Raw], machine: Machine) -> list[Raw]:
    """Return the requests with one engine for all that have `engine=auto`, so that speeds can be compared.

    The engine is the first one other than DEFAULT_ENGINE that a training stack or an offloaded optimizer
    needs. Without such a need the requests are unchanged. A request stays at `auto` if its cell is illegal
    under this engine. Raises ConfigError for a request with unknown keys.
    """
    for raw in raws:
        refuse_unknown_keys(raw)
    at_auto = [raw for raw in raws if raw["engine"]["name"] == AUTO]
    if not any(is_stack(raw["trainer"]["name"]) or raw["offload"]["optimizer"] for raw in at_auto):
        return [*raws]
    names = (resolve(raw, machine).engine.name for raw in at_auto)
    other = next((name for name in names if name not in (DEFAULT_ENGINE, NOT_USED)), None)
    if other is None:
        return [*raws]
    option = read_option("engine", other)

    def with_other(raw: Raw) -> Raw:
        changed = {**raw, "engine": {**option, "leaf": raw["engine"]["leaf"]}}
        return changed if refusal(resolve(changed, machine)) is None else raw

    return [with_other(raw) if raw["engine"]["name"] == AUTO else raw for raw in raws]
