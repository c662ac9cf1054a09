"""Coverage of intervals, counted over all orders of samples."""

from itertools import combinations

import pytest

from bench.common.statistics import (
    MIN_PROCESSES,
    interval_rank,
    pair_rank,
    ratio_interval,
)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (3, 5), (4, 4), (5, 2), (6, 6), (7, 6), (6, 9)])
def test_pair_rank_is_the_largest_with_five_percent_misses(n, m):
    places = [*combinations(range(n + m), n)]
    smaller = [sum(place - number for number, place in enumerate(chosen)) for chosen in places]

    def missed(k):
        return 2 * sum(u < k for u in smaller) / len(places)

    k = pair_rank(n, m)
    assert missed(k) <= 0.05 < missed(k + 1)


def test_min_processes_is_the_smallest_with_an_interval():
    assert interval_rank(MIN_PROCESSES) > interval_rank(MIN_PROCESSES - 1) == 0


def test_ratio_interval_of_swapped_sides_is_the_inverse():
    ones, others = [2.0, 2.2, 2.4, 2.1, 2.3, 2.5], [1.0, 1.1, 1.2, 1.05, 1.15, 1.25]
    (ratio, interval), (inverse, inverted) = ratio_interval(ones, others), ratio_interval(others, ones)
    assert ratio == pytest.approx(2, rel=0.01)
    assert interval.low < ratio < interval.high
    assert (inverse, inverted.low, inverted.high) == pytest.approx(
        (1 / ratio, 1 / interval.high, 1 / interval.low)
    )
