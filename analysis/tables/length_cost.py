"""A step's time split by how it grows with the length, as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.cells.length_cost import TERMS, UNIT, LengthCost, Term
from analysis.labels import number_label, percent_label
from bench.labels import length_label

HEADINGS = (
    "series", "lengths", "fixed (ms)", "per 1k tokens (ms)", "per (1k tokens)^2 (ms)",
    "of the shortest step", "of the longest step", "largest part", "off by at most",
    "tokens/s, longest / shortest",
)  # fmt: skip
SHORT_HEADINGS = ("series", "lengths", "fixed ms", "ms/1k", "ms/(1k)^2", "largest part up to")
"""Some of them for a terminal."""
READING = (
    "A step's time as a + b S + c S^2, none of them negative, with the least relative errors; in brackets the"
    " range of the fits that leave one length out. Of a step: its fixed / linear / quadratic part, as fitted."
)
SMALL = 0.01


def length_cost_rows(costs: Sequence[LengthCost]) -> list[tuple[str, ...]]:
    """In the order of HEADINGS."""
    return [*map(_row, costs)]


def length_cost_short_rows(costs: Sequence[LengthCost]) -> list[tuple[str, ...]]:
    """In the order of SHORT_HEADINGS, without the ranges."""
    return [
        (each.name, _lengths(each), *(_number(term.value) for term in each.terms), _largest_up_to(each))
        for each in costs
    ]


def _row(cost: LengthCost) -> tuple[str, ...]:
    return (
        cost.name,
        _lengths(cost),
        *map(_ranged, cost.terms),
        *(_shares(cost, length) for length in (cost.lengths[0], cost.lengths[-1])),
        _largest(cost),
        percent_label(cost.largest_misfit),
        number_label(cost.speed_up),
    )


def _lengths(cost: LengthCost) -> str:
    """`6: 8k to 128k`."""
    first, last = length_label(cost.lengths[0]), length_label(cost.lengths[-1])
    return f"{len(cost.lengths)}: {first} to {last}"


def _ranged(term: Term) -> str:
    """`1,234 (1,100 to 1,300)`."""
    return f"{_number(term.value)} ({_number(term.low)} to {_number(term.high)})"


def _number(value: float) -> str:
    """Two digits of a small figure: a cost per squared length may be thousandths of a millisecond."""
    if value == 0:
        return "0"
    return f"{value:.2g}" if value < SMALL else number_label(value)


def _shares(cost: LengthCost, length: int) -> str:
    """`63 / 35 / 2 %`."""
    shares = " / ".join(f"{cost.share(term, length):.0%}".rstrip("%") for term in range(len(TERMS)))
    return f"{shares} %"


def _largest(cost: LengthCost) -> str:
    """`fixed to 9.4k, linear to 61k, quadratic beyond`, also outside of the lengths that were run."""
    found = cost.dominant
    ends = [start for _, start in found[1:]]
    parts = [f"{TERMS[term]} to {_length(end)}" for (term, _), end in zip(found, ends, strict=False)]
    return ", ".join([*parts, f"{TERMS[found[-1][0]]}{' beyond' if parts else ''}"])


def _largest_up_to(cost: LengthCost) -> str:
    """`fixed 9.4k, linear 61k, quadratic`."""
    ends = [*(f" {_length(start)}" for _, start in cost.dominant[1:]), ""]
    return ", ".join(f"{TERMS[term]}{end}" for (term, _), end in zip(cost.dominant, ends, strict=True))


def _length(tokens: float) -> str:
    return f"{number_label(tokens / UNIT)}k"
