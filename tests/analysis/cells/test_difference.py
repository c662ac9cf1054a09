"""What may be said of two cells from their processes, and how often that is wrong."""

import numpy as np
import pytest

from analysis.cells.difference import NOT_IN_TURNS, Processes, difference

TRIALS = 2000


def times(count, first=0, step=2):
    """When processes started that had every second turn."""
    return tuple(f"2026-01-01T00:{first + step * turn:02d}:00+00:00" for turn in range(count))


def side(rates, first=0, step=2):
    return Processes(tuple(rates), times(len(rates), first, step))


def drawn(random, effect, *, speed=1.0, processes=6, steps=20):
    """Rates of processes that differ by `effect`, of the median step of each, whose steps differ by 2 %."""
    own = np.exp(effect * random.standard_normal((processes, 1)))
    return speed * np.median(own * np.exp(0.02 * random.standard_normal((processes, steps))), axis=1)


@pytest.mark.parametrize("effect", [0.01, 0.02])
def test_identical_cells_are_called_different_in_at_most_one_of_twenty(effect):
    random = np.random.default_rng(1)
    found = [difference(side(drawn(random, effect)), side(drawn(random, effect), 1)) for _ in range(TRIALS)]
    claims = sum(each.is_faster or each.is_slower for each in found)
    assert 0.02 < claims / TRIALS <= 0.05


@pytest.mark.parametrize("effect", [0.01, 0.02])
def test_ten_percent_are_found_in_four_of_five(effect):
    random = np.random.default_rng(0)
    fast = (side(drawn(random, effect, speed=1.1)) for _ in range(400))
    found = sum(difference(each, side(drawn(random, effect), 1)).is_faster for each in fast)
    assert found / 400 >= 0.8


def test_sides_that_ran_one_after_the_other_are_undecided():
    rates = [10.0, 11, 12, 13, 14, 15]
    assert difference(side(rates, step=1), side(rates, first=6, step=1)).undecided == NOT_IN_TURNS
    assert difference(side(rates, first=6, step=1), side(rates, step=1)).undecided == NOT_IN_TURNS
    in_turns = difference(side(rates), side([rate / 10 for rate in rates], first=1))
    assert (in_turns.undecided, in_turns.is_faster) == (None, True)


def test_sides_of_which_it_is_not_known_when_each_process_ran_are_undecided():
    known, unknown = side([1.0] * 6), Processes((2.0,) * 6, (None, *times(5, 3)))
    assert difference(known, unknown).undecided == NOT_IN_TURNS
