"""Time is measured on merged spans: nothing that overlaps or nests is counted twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.trace.intervals import intersect, length, subtract

TICKS = 20
SPANS = st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted), max_size=8)


def ticks(spans):
    """The unit ticks that spans cover: arithmetic that cannot be wrong in the same way."""
    return {tick for start, end in spans for tick in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_every_instant_is_in_both_or_left_over_and_never_twice(first, second):
    both, left = intersect(first, second), subtract(first, second)
    assert ticks(both) == ticks(first) & ticks(second)
    assert ticks(left) == ticks(first) - ticks(second)
    assert length(first) == len(ticks(first))
    for spans in (both, left):
        assert np.all(spans[1:, 0] > spans[:-1, 1])
