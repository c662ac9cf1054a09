"""Whether what a rank needs fits into what it has."""

from __future__ import annotations

from enum import StrEnum

from bench.cost.band import Band


class Fit(StrEnum):
    """Whether what a rank needs is what it has."""

    FITS = "fits"
    UNDECIDED = "undecided"
    """What it has lies within the band of what it needs."""
    OUT_OF_MEMORY = "out_of_memory"


def fit_of(needed: Band, usable_bytes: int) -> Fit:
    """By both ends of what is needed."""
    if needed.high <= usable_bytes:
        return Fit.FITS
    return Fit.UNDECIDED if needed.low <= usable_bytes else Fit.OUT_OF_MEMORY
