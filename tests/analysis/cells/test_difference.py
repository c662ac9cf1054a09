"""Decides between two cells from their processes, and how often the decision is wrong."""

import numpy as np
import pytest

from analysis.cells.difference import NOT_INTERLEAVED, Processes, speed_difference

TRIALS = 2000


def times(count, first=0, step=2):
    """Return start times of processes that alternate with those of another side."""
    return tuple(f"2026-01-01T00:{first + step * number:02d}:00+00:00" for number in range(count))


def side(rates, first=0, step=2):
    return Processes(tuple(rates), times(len(rates), first, step))


def random_rates(random, effect, *, speed=1.0, processes=6, steps=20):
    """Return median rates of processes that differ by `effect`, each with steps that differ by 2 %."""
    factor = np.exp(effect * random.standard_normal((processes, 1)))
    return speed * np.median(factor * np.exp(0.02 * random.standard_normal((processes, steps))), axis=1)


@pytest.mark.parametrize("effect", [0.01, 0.02])
def test_identical_cells_differ_in_at_most_one_of_twenty(effect):
    random = np.random.default_rng(1)
    trials = [
        speed_difference(side(random_rates(random, effect)), side(random_rates(random, effect), 1))
        for _ in range(TRIALS)
    ]
    claims = sum(trial.is_faster or trial.is_slower for trial in trials)
    assert 0.02 < claims / TRIALS <= 0.05


@pytest.mark.parametrize("effect", [0.01, 0.02])
def test_difference_of_ten_percent_is_found_in_four_of_five(effect):
    random = np.random.default_rng(0)
    fast = (side(random_rates(random, effect, speed=1.1)) for _ in range(400))
    faster = sum(speed_difference(one, side(random_rates(random, effect), 1)).is_faster for one in fast)
    assert faster / 400 >= 0.8


def test_processes_that_were_not_interleaved_are_undecided():
    rates = [10.0, 11, 12, 13, 14, 15]
    assert speed_difference(side(rates, step=1), side(rates, first=6, step=1)).undecided == NOT_INTERLEAVED
    assert speed_difference(side(rates, first=6, step=1), side(rates, step=1)).undecided == NOT_INTERLEAVED
    interleaved = speed_difference(side(rates), side([rate / 10 for rate in rates], first=1))
    assert (interleaved.undecided, interleaved.is_faster) == (None, True)


def test_processes_with_unknown_start_times_are_undecided():
    known, unknown = side([1.0] * 6), Processes((2.0,) * 6, (None, *times(5, 3)))
    assert speed_difference(known, unknown).undecided == NOT_INTERLEAVED
