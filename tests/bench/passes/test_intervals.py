"""Time is measured on merged spans: nothing that overlaps or nests is counted twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.passes.trace.intervals import intersect, length, overlap, subtract, union

TICKS = 20
SPANS = st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted), max_size=8)


def ticks(spans):
    """The unit ticks that spans cover: arithmetic that cannot be wrong in the same way."""
    return {tick for start, end in spans for tick in range(int(start), int(end))}


def test_overlapping_and_nested_spans_are_counted_once():
    assert union([(5, 6), (0, 3), (1, 2), (2, 4)]).tolist() == [[0, 4], [5, 6]]
    assert length([(5, 6), (0, 3), (1, 2), (2, 4)]) == 5


def test_spans_that_touch_become_one():
    assert union([(0, 1), (1, 2)]).tolist() == [[0, 2]]


def test_overlap_is_the_time_that_both_cover():
    assert overlap([(0, 10)], [(2, 3), (5, 20)]) == 6
    assert overlap([(0, 1)], [(1, 2)]) == 0


def test_what_is_left_has_holes_where_the_other_was():
    assert subtract([(0, 10)], [(2, 3), (5, 6)]).tolist() == [[0, 2], [3, 5], [6, 10]]


@pytest.mark.parametrize("function", [union, lambda spans: subtract(spans, []), lambda s: intersect(s, s)])
def test_nothing_comes_of_nothing(function):
    assert function([]).shape == (0, 2)


@given(SPANS, SPANS)
def test_every_instant_is_in_both_or_left_over_and_never_twice(first, second):
    both, left = intersect(first, second), subtract(first, second)
    assert ticks(both) == ticks(first) & ticks(second)
    assert ticks(left) == ticks(first) - ticks(second)
    assert length(first) == len(ticks(first))
    for spans in (both, left):
        assert np.all(spans[1:, 0] > spans[:-1, 1])
