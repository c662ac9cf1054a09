"""Bands: estimates with a lower and an upper bound, and the comparison of needed with usable memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BandEnd(StrEnum):
    """Lower bound, expected value or upper bound of an estimate."""

    LOW = "low"
    EXPECTED = "expected"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Band:
    """Expected value, with the bounds that a measured value should lie between."""

    low: float
    expected: float
    high: float

    @classmethod
    def from_function(cls, value: Callable[[BandEnd], float]) -> Band:
        """Return the band of a function's values.

        The smallest and the largest of the three values are the bounds, because the function may fall from
        LOW to HIGH.
        """
        values = {end: value(end) for end in BandEnd}
        return cls(min(values.values()), values[BandEnd.EXPECTED], max(values.values()))

    def value_at(self, end: BandEnd) -> float:
        """Return a bound, or the expected value."""
        return {BandEnd.LOW: self.low, BandEnd.EXPECTED: self.expected, BandEnd.HIGH: self.high}[end]


class Fit(StrEnum):
    """Comparison of a rank's needed memory with its usable memory."""

    FITS = "fits"
    UNDECIDED = "undecided"
    """Usable memory lies between the bounds of needed memory."""
    OUT_OF_MEMORY = "out_of_memory"


def fit_of(needed: Band, usable_bytes: int) -> Fit:
    """Compare the band of needed bytes with the usable bytes."""
    if needed.high <= usable_bytes:
        return Fit.FITS
    return Fit.UNDECIDED if needed.low <= usable_bytes else Fit.OUT_OF_MEMORY
