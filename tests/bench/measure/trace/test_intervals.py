"""Intersection, difference and length of spans count overlapping and nested time once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.measure.trace.intervals import intersect, length, subtract

TICKS = 20
SPANS = st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted), max_size=8)


def ticks(spans):
    """Return the unit ticks that spans cover, by arithmetic that cannot fail in the same way."""
    return {tick for start, end in spans for tick in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_intersect_and_subtract_partition_the_first_spans(first, second):
    both, rest = intersect(first, second), subtract(first, second)
    assert ticks(both) == ticks(first) & ticks(second)
    assert ticks(rest) == ticks(first) - ticks(second)
    assert length(first) == len(ticks(first))
    for spans in (both, rest):
        assert np.all(spans[1:, 0] > spans[:-1, 1])
