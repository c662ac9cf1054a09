"""Why tokens/s change with the length, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.cells.length_cost import MIN_LENGTHS, LengthCost, LengthCosts, TooFew
from analysis.labels import count_label, number_label, percent_label
from bench.labels import length_label
from bench.record import Provenance

MAX_SENTENCES = 6
LARGE_MISFIT = 0.1
"""A sum of three terms that misses a time by more than this part of it does not describe the series."""
PREDICTED = Provenance.PREDICTED.value


def length_cost_lines(costs: LengthCosts) -> list[str]:
    """A sentence for each series that is split, the first of too many; and why others are not."""
    lines = [_sentence(cost) for cost in costs.split[:MAX_SENTENCES]]
    rest = len(costs.split) - MAX_SENTENCES
    more = [f"and {count_label(rest, 'more series', 'more series')} in the table."] if rest > 0 else []
    return [*lines, *more, *([_too_few(costs.too_few)] if costs.too_few else [])]


def _sentence(cost: LengthCost) -> str:
    """What the fixed cost is of the shortest and the longest step, and what tokens/s would do without it."""
    first, last = (length_label(length) for length in (cost.lengths[0], cost.lengths[-1]))
    who = cost.name + (", predicted" if cost.is_predicted and PREDICTED not in cost.name else "")
    rates = f"tokens/s at {last} are {number_label(cost.speed_up)} times those at {first}"
    fixed, without = cost.terms[0], cost.speed_up_without_fixed
    span = f"({number_label(fixed.low)} to {number_label(fixed.high)} ms with any one length left out)"
    misfit = ""
    if cost.largest_misfit > LARGE_MISFIT:
        misfit = f"; the fitted times are off by up to {percent_label(cost.largest_misfit)}"
    if not fixed.value:
        return f"{who}: no fixed cost shows in these lengths {span}; {rates}{misfit}."
    shares = " and ".join(
        f"{percent_label(cost.share(0, length))} of it at {length_label(length)}"
        for length in (cost.lengths[0], cost.lengths[-1])
    )
    other = "" if without is None else f"; without it they would be {number_label(without)} times those"
    start = f"{who}: {number_label(fixed.value)} ms of a step are fixed {span}"
    return f"{start}, {shares}; {rates}{other}{misfit}."


def _too_few(series: Sequence[TooFew]) -> str:
    most = max(each.lengths for each in series)
    these = f"{series[0].name} has {most}" if len(series) == 1 else f"these have {most} at the most"
    return (
        "A step's time is split into fixed, linear and quadratic cost where a series has a result at"
        f" {MIN_LENGTHS} or more lengths; {these}."
    )
