"""Whether the optimizer reached every parameter, and replicas stayed equal. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from bench.config import OWN, Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, Moment, PassFacts, RankReport, by_rank

NOT_AVERAGED = (
    ": they began as different weights, or gradients were not averaged over these ranks; let DDP, FSDP or"
    " DeepSpeed do both"
)
"""What is added of somebody's own loop."""
MOVED, BEFORE = "every shard of the parameters", "itself before the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUpdates:
    """One rank's shards of the parameters."""

    shard_index: int
    """Ranks with the same hold replicas of one another."""
    digests: dict[str, str]
    """Of the shards after the last step that was looked at, by parameter; empty ones have none."""
    unmoved: list[str]
    """Parameters of whose shards not one bit changed from the first step to that one, or in that one. Shards
    of zeros do not count: on many ranks some hold nothing but what fills a parameter up."""
    not_finite: list[str]
    """Parameters in whose shards a number is not finite after the last step, and `exp_avg of` those of whose
    optimizer state one is not."""


class UpdatesSection(Struct, frozen=True, kw_only=True):
    """What the optimizer did to the parameters, as their bits show it."""

    shards: int
    """How many shards of parameters all ranks hold."""
    replicas: int
    """How many of them have an equal on another rank that they were compared with."""
    unmoved: dict[str, list[int]]
    """By parameter the ranks on which an update left it as it was."""
    unequal: dict[str, list[int]]
    """By parameter the ranks whose replicas differ."""
    not_finite: dict[str, list[int]]
    """By parameter, or state of the optimizer, the ranks on which a number of it is not finite."""


class UpdatesFacts(PassFacts[RankUpdates, UpdatesSection]):
    name = "updates"
    part = RankUpdates
    workload = "train"
    is_own_work = False
    is_evidence = True
    judges = Moment.PARAMETERS

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> UpdatesSection:
        parts, ranks = self.parts(reports), cell.running_ranks
        unequal: dict[str, list[int]] = {}
        replicas = 0
        for (_, name), digests in _replicas(parts, ranks).items():
            replicas += len(digests) if len(digests) > 1 else 0
            if len({*digests.values()}) > 1:
                unequal.setdefault(name, []).extend(digests)
        return UpdatesSection(
            shards=sum(map(len, by_rank(parts, "digests"))),
            replicas=replicas,
            unmoved=_ranks_by_name(by_rank(parts, "unmoved"), ranks),
            unequal=unequal,
            not_finite=_ranks_by_name(by_rank(parts, "not_finite"), ranks),
        )

    def gate(self, cell: Cell, section: UpdatesSection) -> str | None:
        """Parameters and optimizer state are finite, every update reached every shard, replicas are equal."""
        for name, ranks in section.not_finite.items():
            return f"updates: numbers of {name} are not finite on {_listed(ranks)}"
        for name, ranks in section.unmoved.items():
            return f"updates: an optimizer step left {name} as it was on {_listed(ranks)}"
        for name, ranks in section.unequal.items():
            cause = NOT_AVERAGED if cell.trainer == OWN else ""
            return f"updates: replicas of {name} differ on {_listed(ranks)}{cause}"
        return None

    def checks(self, cell: Cell, section: UpdatesSection | None) -> list[Check]:  # noqa: ARG002
        """That parameters moved, and that replicas are equal, where there are any."""
        if section is None:
            return [Check(what=MOVED, against=BEFORE, reason=NOT_RUN)]
        moved = Check(what=MOVED, against=BEFORE, steps=1)
        return (
            [moved, Check(what="replicas", against="one another", steps=1)] if section.replicas else [moved]
        )


def _replicas(parts: Sequence[RankUpdates], ranks: Sequence[int]) -> Mapping[tuple[int, str], dict[int, str]]:
    """By shard and parameter the digest of every rank that holds it."""
    found: dict[tuple[int, str], dict[int, str]] = {}
    for rank, part in zip(ranks, parts, strict=True):
        for name, digest in part.digests.items():
            found.setdefault((part.shard_index, name), {})[rank] = digest
    return found


def _ranks_by_name(per_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> dict[str, list[int]]:
    """By name the ranks that list it."""
    found: dict[str, list[int]] = {}
    for rank, names in zip(ranks, per_rank, strict=True):
        for name in names:
            found.setdefault(name, []).append(rank)
    return found


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


FACTS = UpdatesFacts()
