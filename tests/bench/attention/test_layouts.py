"""Layouts put every token on one rank, and their tiles match the causal mask."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.attention.layouts import LAYOUTS, cut_pieces


def positions(layout, seq_len, sp_degree, rank):
    return [i for piece in layout.slices(seq_len, sp_degree, rank) for i in range(seq_len)[piece]]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@given(sp_degree=st.integers(1, 9), rows=st.integers(1, 5))
def test_layout_puts_every_token_on_one_rank_in_equal_shards(name, sp_degree, rows):
    layout = LAYOUTS[name]
    seq_len = rows * layout.length_multiple(sp_degree)
    shards = [positions(layout, seq_len, sp_degree, rank) for rank in range(sp_degree)]
    assert sorted(itertools.chain(*shards)) == list(range(seq_len))
    assert {len(shard) for shard in shards} == {seq_len // sp_degree}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@given(degree=st.integers(1, 5), rows=st.integers(1, 4))
def test_causal_tiles_match_the_causal_mask(name, degree, rows):
    layout = LAYOUTS[name]
    seq_len = rows * layout.length_multiple(degree)
    shard_len = seq_len // degree
    for rank, source in itertools.product(range(degree), repeat=2):
        queries, keys = (positions(layout, seq_len, degree, r) for r in (rank, source))
        visible = {(i, j) for i, j in itertools.product(range(shard_len), repeat=2) if queries[i] >= keys[j]}
        assert visible == pairs_of(layout.causal_tile(shard_len, rank, source), shard_len)


def pairs_of(tile, shard_len):
    if tile is None:
        return set()
    rows, columns = range(shard_len)[tile.queries], range(shard_len)[tile.keys]
    pairs = itertools.product(enumerate(rows), enumerate(columns))
    return {(i, j) for (a, i), (b, j) in pairs if a >= b or not tile.causal}


@given(degree=st.integers(1, 5), rows=st.integers(1, 4))
def test_zigzag_gives_every_rank_the_same_causal_area(degree, rows):
    layout = LAYOUTS["zigzag"]
    seq_len = rows * layout.length_multiple(degree)
    assert len({sum(i + 1 for i in positions(layout, seq_len, degree, rank)) for rank in range(degree)}) == 1


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@given(ulysses=st.integers(1, 4), ring=st.integers(1, 4), rows=st.integers(1, 3))
def test_cut_divides_a_ring_shard_among_ulysses_ranks(name, ulysses, ring, rows):
    layout = LAYOUTS[name]
    seq_len = rows * layout.length_multiple(ring) * ulysses
    size = seq_len // (ring * ulysses)
    for ring_rank in range(ring):
        pieces = layout.slices(seq_len, ring, ring_rank)
        shards = [cut_pieces(pieces, seq_len, u * size, (u + 1) * size) for u in range(ulysses)]
        tokens = [i for shard in shards for piece in shard for i in range(seq_len)[piece]]
        assert tokens == positions(layout, seq_len, ring, ring_rank)
