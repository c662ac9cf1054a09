"""Which rank was replayed, and what it handed to collectives in one step: the replay pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import RunConfig
from bench.cost.traffic import Messages
from bench.passes.facts import PassFacts, RankReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The one rank that ran, of a cell in `mode=replay`."""

    rank: int
    """Its number among all ranks of the cell."""
    messages: list[Messages]
    """Calls of the inspected step, equal ones counted together. A receive's bytes are those that arrive."""


class ReplayFacts(PassFacts[Replay, Replay]):
    name = "replay"
    part = Replay
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Replay:  # noqa: ARG002
        (part,) = self.parts(reports)
        return part


FACTS = ReplayFacts()
