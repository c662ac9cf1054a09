"""What one side, records or the cost model, says of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from analysis.published.setup import Difference


class Verdict(StrEnum):
    AS_PUBLISHED = "as published"
    FASTER = "faster than published"
    SLOWER = "slower than published"
    MORE_MEMORY = "more memory than published"
    LESS_MEMORY = "less memory than published"
    OUT_AS_PUBLISHED = "out of memory as published"
    RAN = "ran where the source ran out of memory"
    RAN_OUT = "out of memory where the source ran"
    CONTRADICTED = "contradicted"
    """Verdict of records on any other number, such as a ratio."""
    CONSISTENT = "consistent with the model"
    INCONSISTENT = "inconsistent with the model"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"

    @property
    def is_by_records(self) -> bool:
        """Return whether records of a comparable set-up gave this verdict."""
        others = (Verdict.CONSISTENT, Verdict.INCONSISTENT, Verdict.UNDECIDED, Verdict.NOT_COMPARABLE)
        return self not in others


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
