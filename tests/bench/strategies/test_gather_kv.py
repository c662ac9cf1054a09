"""Gathered keys are attended to in as few kernel calls as the mask allows, and in no fewer."""

import pytest

from bench.attention.layouts import LAYOUTS
from bench.strategies.gather_kv.facts import blocks_of, calls_on_others, calls_on_own
from tests.cells import make_cell

SHARD = 8


def calls_of(layout, rank, ranks):
    def tiles_of(source):
        tile = LAYOUTS[layout].causal_tile(SHARD, rank, source)
        return () if tile is None else (tile,)

    return [*calls_on_own(tiles_of, rank), *calls_on_others(tiles_of, rank, ranks)]


def pairs_seen(layout, rank, ranks, call):
    """(query, key) positions of a call, each shard's tokens by their place in the sequence."""

    def positions(each):
        pieces = LAYOUTS[layout].slices(SHARD * ranks, ranks, each)
        return [token for piece in pieces for token in range(SHARD * ranks)[piece]]

    queries = positions(rank)[call.tile.queries]
    keys = [key for source in range(ranks)[call.sources] for key in positions(source)[call.tile.keys]]
    return [
        (query, key)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if not call.tile.causal or j <= i
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_calls_of_all_ranks_see_each_pair_that_the_mask_leaves_once(layout, ranks):
    seen = [
        pair
        for rank in range(ranks)
        for call in calls_of(layout, rank, ranks)
        for pair in pairs_seen(layout, rank, ranks, call)
    ]
    length = SHARD * ranks
    assert sorted(seen) == [(query, key) for query in range(length) for key in range(query + 1)]


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 2), ("zigzag", 3), ("striped", 8)])
def test_only_triangles_need_a_call_for_each_rank(layout, most):
    assert max(len(calls_of(layout, rank, 8)) for rank in range(8)) == most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_has_more_to_do_than_the_last_of_which_the_schedule_is(layout):
    cell = make_cell("strategy=gather_kv", f"layout={layout}", "cluster.world_size=4", "seq_len=256")
    areas = [sum(block.area for _, block in blocks_of(cell, rank)) for rank in range(4)]
    assert max(areas) == areas[-1]
