"""One engine for all cells of a request that leaves it open."""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import AUTO
from bench.environment import Machine
from bench.request.choices import Raw, read_option
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.training.trainer_facts import is_stack


def with_one_engine(raws: Sequence[Raw], machine: Machine) -> list[Raw]:
    """Return the requests with ZeRO-3 for every `engine=auto` where one of them has no other.

    Speeds are compared under equal engines. Cells that do not run under ZeRO-3 keep their own choice.
    """
    left_open = [raw for raw in raws if raw["engine"]["name"] == AUTO]
    if not any(is_stack(raw["trainer"]["name"]) or raw["offload"]["optimizer"] for raw in left_open):
        return [*raws]
    if all(resolve(raw, machine).engine.name != "zero3" for raw in left_open):
        return [*raws]
    zero3 = read_option("engine", "zero3")

    def with_zero3(raw: Raw) -> Raw:
        asked = {**raw, "engine": {**zero3, "leaf": raw["engine"]["leaf"]}}
        return asked if refusal(resolve(asked, machine)) is None else raw

    return [with_zero3(raw) if raw["engine"]["name"] == AUTO else raw for raw in raws]
