"""What one side, records or the cost model, says of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from analysis.published.setup import Difference


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    """By measured records of a comparable set-up."""
    CONTRADICTED = "contradicted"
    """By the same."""
    CONSISTENT = "consistent with the model"
    INCONSISTENT = "inconsistent with the model"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Opinion:
    """A verdict on one side's word."""

    verdict: Verdict
    why: str
    missing: Sequence[Difference] = ()
    """Why it has none, where the claim is not comparable."""


def without(field: str, published: str | None, here: str) -> Opinion:
    """No verdict, for want of this field."""
    missing = Difference(field, published, here)
    return Opinion(Verdict.NOT_COMPARABLE, str(missing), [missing])
