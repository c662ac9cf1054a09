"""What a step costs whatever the length, in proportion to it, and to its square: t = a + b S + c S^2.

The terms are the work that no token causes (launches, parameters under way, the optimizer), that every token
causes (matrix products, the loss) and that every pair of tokens causes (attention). None is negative, so it
is a least-squares fit under that condition (C. L. Lawson and R. J. Hanson, Solving least squares problems,
1974, chapter 23); errors are relative, since times are off by a share of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from bench.record import Provenance

MIN_LENGTHS = 4
"""One more than the terms: else the fit is exact, and says nothing of itself."""
TERMS = ("fixed", "linear", "quadratic")
POWERS = (0, 1, 2)
UNIT = 1024
"""Tokens in which lengths are counted."""

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Term:
    """One of the three, in ms per step, per 1k tokens of the sequence, or per 1k tokens squared."""

    value: float
    low: float
    high: float
    """The least and the most that the fits give which leave one length out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCost:
    """The steps of one series, split."""

    name: str
    is_predicted: bool
    lengths: tuple[int, ...]
    step_ms: tuple[float, ...]
    """By length."""
    terms: tuple[Term, Term, Term]
    """In the order of TERMS."""
    largest_misfit: float
    """Of the fitted times from these ones, as a part of them."""

    def share(self, term: int, length: int) -> float:
        """The part of the fitted step at a length that one of TERMS takes."""
        parts = _design([length])[0] * np.array([each.value for each in self.terms])
        return float(parts[term] / parts.sum())

    @property
    def dominant(self) -> list[tuple[int, float]]:
        """The terms that are the largest of the three somewhere, each with the length from which it is."""
        return [*_dominant([each.value for each in self.terms])]

    @property
    def speed_up(self) -> float:
        """Tokens/s at the longest length over those at the shortest."""
        return (self.lengths[-1] / self.step_ms[-1]) / (self.lengths[0] / self.step_ms[0])

    @property
    def speed_up_without_fixed(self) -> float | None:
        """The same of the fitted steps without their fixed cost; None where nothing else is fitted."""
        shortest, longest = (self._variable_ms(length) for length in (self.lengths[0], self.lengths[-1]))
        return None if not longest else self.lengths[-1] / longest * shortest / self.lengths[0]

    def _variable_ms(self, length: int) -> float:
        values = np.array([each.value for each in self.terms])
        return float(_design([length])[0, 1:] @ values[1:])


@dataclass(frozen=True, slots=True)
class TooFew:
    """A series that has several lengths, but not enough to be split."""

    name: str
    lengths: int


@dataclass(frozen=True, slots=True)
class LengthCosts:
    """The series of some cells, as far as they have several lengths."""

    split: Sequence[LengthCost] = ()
    """Those with a step time at MIN_LENGTHS lengths."""
    too_few: Sequence[TooFew] = ()
    """Those with two or more, but fewer."""


def length_costs(cells: Cells) -> LengthCosts:
    """Every series with a step time at MIN_LENGTHS lengths, split."""
    split, too_few = [], []
    for each in cells.series:
        steps = _steps(each)
        if len(steps) >= MIN_LENGTHS:
            split.append(_split(each, steps))
        elif len(steps) > 1:
            too_few.append(TooFew(each.label, len(steps)))
    return LengthCosts(split, too_few)


def fitted(lengths: Sequence[int], step_ms: Sequence[float]) -> Vector:
    """The three terms, none negative, with the least sum of squared relative errors.

    The best fit has some terms at zero and is a plain least-squares fit of the others, so all choices of the
    others are tried.
    """
    times = np.array(step_ms, dtype=np.float64)
    relative = _design(lengths) / times[:, None]
    best, least = np.zeros(len(TERMS)), np.inf
    for columns in _choices():
        values, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(times)), rcond=None)
        error = float(np.sum((relative[:, columns] @ values - 1) ** 2))
        if values.min() >= 0 and error < least:
            best, least = np.zeros(len(TERMS)), error
            best[[*columns]] = values
    return best


def _choices() -> Iterator[list[int]]:
    for count in range(1, len(TERMS) + 1):
        yield from map(list, combinations(range(len(TERMS)), count))


def _design(lengths: Sequence[int]) -> Vector:
    """[length, term]: what each term is multiplied by."""
    in_units = np.array(lengths, dtype=np.float64) / UNIT
    return np.stack([in_units**power for power in POWERS], axis=1)


def _steps(series: Series) -> pd.Series[float]:
    """The step times of a series by length; of two cells of one length the first: nothing sets them apart."""
    timed = series.rows[series.rows["step_time_ms"].notna()].drop_duplicates("seq_len")
    return timed.set_index("seq_len")["step_time_ms"].astype("float64").sort_index()


def _split(series: Series, steps: pd.Series[float]) -> LengthCost:
    lengths, times = [int(length) for length in steps.index], [float(each) for each in steps]
    values = fitted(lengths, times)
    others = np.array(
        [fitted([*lengths[:out], *lengths[out + 1 :]], [*times[:out], *times[out + 1 :]])
         for out in range(len(lengths))]
    )  # fmt: skip
    low, high = np.minimum(values, others.min(axis=0)), np.maximum(values, others.max(axis=0))
    fixed, linear, quadratic = (Term(*map(float, ends)) for ends in zip(values, low, high, strict=True))
    return LengthCost(
        name=series.label,
        is_predicted=bool(series.rows["provenance"].eq(Provenance.PREDICTED).any()),
        lengths=tuple(lengths),
        step_ms=tuple(times),
        terms=(fixed, linear, quadratic),
        largest_misfit=float(np.abs(_design(lengths) @ values / np.array(times) - 1).max()),
    )


def _dominant(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    """From length 0 up the largest of the terms, and where the next one overtakes it."""
    start, now = 0.0, next(term for term, value in enumerate(values) if value > 0)
    while True:
        yield now, start
        meets = [
            ((values[now] / values[term]) ** (1 / (POWERS[term] - POWERS[now])) * UNIT, -term)
            for term in range(now + 1, len(values))
            if values[term] > 0
        ]
        if not meets:
            return
        start, negative = min(meets)
        now = -negative
