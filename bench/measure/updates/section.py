"""Section, gate and checks of the updates pass: updated parameters and equal replicas. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from bench.config import USER_CODE, Cell
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, FaultOrigin, PassFacts, RankReport, field_by_rank

NOT_AVERAGED = (
    ": they began as different weights, or gradients were not averaged over these ranks; let DDP, FSDP or"
    " DeepSpeed do both"
)
"""End of the message about unequal replicas in a user's own training loop."""
MOVED, BEFORE = "every shard of the parameters", "itself before the step"
"""Compared quantity of the first check, and the source of the values that it is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUpdates:
    """State of one rank's shards of the parameters."""

    shard_index: int
    """Number of the shard that this rank holds. Ranks with the same number hold replicas."""
    digests: dict[str, str]
    """Digest of this rank's shard after the inspected step, by parameter; an empty shard has none."""
    unmoved: list[str]
    """Parameters whose shard did not change in any bit between the first and the inspected step, or in the
    inspected step. Shards of zeros do not count, because on many ranks some hold only padding."""
    not_finite: list[str]
    """Parameters whose shard has a number that is not finite after the last step. An optimizer state with
    such a number is listed as `exp_avg of` the parameter."""


class UpdatesSection(Struct, frozen=True, kw_only=True):
    """Effect of the optimizer on the parameters, from digests of the parameters' bits."""

    shards: int
    """Number of parameter shards over all ranks."""
    replicas: int
    """Number of shards that were compared with a replica on another rank."""
    unmoved: dict[str, list[int]]
    """Ranks on which an update did not change a parameter, by parameter."""
    unequal: dict[str, list[int]]
    """Ranks whose replicas of a parameter differ, by parameter."""
    not_finite: dict[str, list[int]]
    """Ranks with a number that is not finite, by parameter or by state of the optimizer."""


class UpdatesFacts(PassFacts[RankUpdates, UpdatesSection]):
    name = "updates"
    part_type = RankUpdates
    workload = "train"
    is_own_work = False
    is_evidence = True
    fault_origin = FaultOrigin.PARAMETERS

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> UpdatesSection:
        parts, ranks = self.parts(reports), cell.running_ranks
        unequal: dict[str, list[int]] = {}
        replicas = 0
        for (_, name), digests in _replicas(parts, ranks).items():
            replicas += len(digests) if len(digests) > 1 else 0
            if len({*digests.values()}) > 1:
                unequal.setdefault(name, []).extend(digests)
        return UpdatesSection(
            shards=sum(map(len, field_by_rank(parts, "digests"))),
            replicas=replicas,
            unmoved=_ranks_by_name(field_by_rank(parts, "unmoved"), ranks),
            unequal=unequal,
            not_finite=_ranks_by_name(field_by_rank(parts, "not_finite"), ranks),
        )

    def gate(self, cell: Cell, section: UpdatesSection) -> str | None:
        """Return a message if a number is not finite, an update missed a shard, or replicas differ."""
        for name, ranks in section.not_finite.items():
            return f"updates: numbers of {name} are not finite on {_rank_list(ranks)}"
        for name, ranks in section.unmoved.items():
            return f"updates: an optimizer step left {name} as it was on {_rank_list(ranks)}"
        for name, ranks in section.unequal.items():
            cause = NOT_AVERAGED if cell.trainer == USER_CODE else ""
            return f"updates: replicas of {name} differ on {_rank_list(ranks)}{cause}"
        return None

    def checks(self, cell: Cell, section: UpdatesSection | None) -> list[Check]:  # noqa: ARG002
        """Return the check that parameters changed, and that replicas are equal if there are any."""
        if section is None:
            return [Check(what=MOVED, against=BEFORE, reason=NOT_RUN)]
        moved = Check(what=MOVED, against=BEFORE, steps=1)
        return (
            [moved, Check(what="replicas", against="one another", steps=1)] if section.replicas else [moved]
        )


def _replicas(parts: Sequence[RankUpdates], ranks: Sequence[int]) -> Mapping[tuple[int, str], dict[int, str]]:
    """Return the digests of each (shard index, parameter) by the rank that holds it."""
    replicas: dict[tuple[int, str], dict[int, str]] = {}
    for rank, part in zip(ranks, parts, strict=True):
        for name, digest in part.digests.items():
            replicas.setdefault((part.shard_index, name), {})[rank] = digest
    return replicas


def _ranks_by_name(per_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return, by name, the ranks whose entry of `per_rank` contains the name."""
    ranks_by_name: dict[str, list[int]] = {}
    for rank, names in zip(ranks, per_rank, strict=True):
        for name in names:
            ranks_by_name.setdefault(name, []).append(rank)
    return ranks_by_name


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


FACTS = UpdatesFacts()
