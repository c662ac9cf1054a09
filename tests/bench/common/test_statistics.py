"""Intervals hold what they promise, by counting all cases."""

from itertools import combinations

import pytest

from bench.common.statistics import (
    MIN_PROCESSES,
    interval_rank,
    pair_rank,
    ratio_interval,
)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (3, 5), (4, 4), (5, 2), (6, 6), (7, 6), (6, 9)])
def test_the_rank_of_pairs_is_the_largest_that_misses_in_at_most_one_of_twenty_orders(n, m):
    places = [*combinations(range(n + m), n)]
    smaller = [sum(place - number for number, place in enumerate(chosen)) for chosen in places]

    def missed(k):
        return 2 * sum(u < k for u in smaller) / len(places)

    k = pair_rank(n, m)
    assert missed(k) <= 0.05 < missed(k + 1)


def test_a_comparison_takes_as_many_processes_as_an_interval_of_a_median():
    assert interval_rank(MIN_PROCESSES) > interval_rank(MIN_PROCESSES - 1) == 0


def test_the_ratio_is_a_factor_whichever_side_stands_first():
    ones, others = [2.0, 2.2, 2.4, 2.1, 2.3, 2.5], [1.0, 1.1, 1.2, 1.05, 1.15, 1.25]
    (ratio, interval), (inverse, inverted) = ratio_interval(ones, others), ratio_interval(others, ones)
    assert ratio == pytest.approx(2, rel=0.01)
    assert interval.low < ratio < interval.high
    assert (inverse, inverted.low, inverted.high) == pytest.approx(
        (1 / ratio, 1 / interval.high, 1 / interval.low)
    )
