"""Layouts deal every token out exactly once, and zigzag evens out the causal work."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.attention.layouts import LAYOUTS


def positions(layout, seq_len, sp_degree, rank):
    return [i for piece in layout.slices(seq_len, sp_degree, rank) for i in range(seq_len)[piece]]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@given(sp_degree=st.integers(1, 9), rows=st.integers(1, 5))
def test_every_token_is_on_exactly_one_rank_and_shards_are_equal(name, sp_degree, rows):
    layout = LAYOUTS[name]
    seq_len = rows * layout.length_multiple(sp_degree)
    shards = [positions(layout, seq_len, sp_degree, rank) for rank in range(sp_degree)]
    assert sorted(itertools.chain(*shards)) == list(range(seq_len))
    assert {len(shard) for shard in shards} == {seq_len // sp_degree}


def test_zigzag_gives_every_rank_the_same_causal_area():
    areas = {sum(i + 1 for i in positions(LAYOUTS["zigzag"], 64, 4, rank)) for rank in range(4)}
    assert len(areas) == 1
