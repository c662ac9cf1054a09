"""What some records say of published numbers, and what those numbers can bear at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from analysis.published.comparable import Comparable
from analysis.published.opinion import Verdict
from analysis.published.registry import read_registry

if TYPE_CHECKING:
    from analysis.published.verdicts import Judgement

HEADINGS = ("claim", "verdict", "why", "source")


@dataclass(frozen=True, slots=True)
class Decided:
    """The claims that some records decide."""

    rows: Sequence[tuple[str, ...]]
    """In the order of HEADINGS."""
    counts: str
    """The verdicts of all claims beside these records."""
    bearings: Sequence[str]
    """What the numbers of the posts among them can bear."""


def decided_claims(records: pd.DataFrame) -> Decided | None:
    """None where no record is of a set-up that somebody has published of."""
    measured = Comparable.of(records)
    if measured.frame.empty:
        return None
    # These import the cost model, and the last one Hydra: for the few sweeps that need them.
    from analysis.published.bearings import bearings
    from analysis.published.model import CostModel
    from analysis.published.verdicts import decided, judged

    registry, model = read_registry(), CostModel()
    found = decided(registry, measured)
    if not found:
        return None
    return Decided(
        rows=[(each.claim.id, each.verdict, each.why, each.claim.source.ref) for each in found],
        counts=counts_line(judged(registry, model, measured)),
        bearings=bearings(registry, model, {each.claim.group for each in found}),
    )


def counts_line(found: Sequence[Judgement]) -> str:
    """`3 reproduced, 12 undecided`, in the order of Verdict."""
    counts = Counter(each.verdict for each in found)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]) or "none"
