"""A figure with its error bar, and whether what a rank needs fits into what it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class End(StrEnum):
    """Which end of what is not exactly known."""

    LOW = "low"
    EXPECTED = "expected"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Band:
    """What is expected, and the ends that a real run should lie between."""

    low: float
    expected: float
    high: float

    @classmethod
    def of(cls, value: Callable[[End], float]) -> Band:
        """The least and the most of three values, and the expected one between them."""
        ends = [value(end) for end in End]
        return cls(min(ends), value(End.EXPECTED), max(ends))

    def at(self, end: End) -> float:
        value: float = getattr(self, end.value)
        return value


class Fit(StrEnum):
    """Whether what a rank needs is what it has."""

    FITS = "fits"
    UNDECIDED = "undecided"
    """Usable memory lies within the band of needed memory."""
    OUT_OF_MEMORY = "out_of_memory"


def fit_of(needed: Band, usable_bytes: int) -> Fit:
    """Return whether what is needed fits, by both of its ends."""
    if needed.high <= usable_bytes:
        return Fit.FITS
    return Fit.UNDECIDED if needed.low <= usable_bytes else Fit.OUT_OF_MEMORY
