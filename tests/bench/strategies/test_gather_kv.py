"""Gathered keys are attended to in as few kernel calls as the mask allows, and in no fewer."""

import pytest

from bench.attention.layouts import LAYOUTS
from bench.strategies.gather_kv.facts import blocks_of, calls_on_others, calls_on_own
from tests.support.cells import make_cell

SHARD = 8


def tiles_of(layout, rank):
    """By source what the mask leaves of its keys."""

    def found(source):
        tile = LAYOUTS[layout].causal_tile(SHARD, rank, source)
        return () if tile is None else (tile,)

    return found


def calls_of(layout, rank, ranks):
    tiles = tiles_of(layout, rank)
    return [*calls_on_own(tiles, rank), *calls_on_others(tiles, rank, ranks)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_calls_of_a_rank_take_each_tile_of_the_mask_once(layout, ranks):
    for rank in range(ranks):
        calls = calls_of(layout, rank, ranks)
        taken = [(source, call.tile) for call in calls for source in range(ranks)[call.sources]]
        left = [(source, tile) for source in range(ranks) for tile in tiles_of(layout, rank)(source)]
        assert sorted(taken, key=lambda each: each[0]) == left
        assert all(call.ranks == 1 for call in calls if call.tile.causal)


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 2), ("zigzag", 3), ("striped", 8)])
def test_only_triangles_need_a_call_for_each_rank(layout, most):
    assert max(len(calls_of(layout, rank, 8)) for rank in range(8)) == most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_has_more_to_do_than_the_last_of_which_the_schedule_is(layout):
    cell = make_cell("strategy=gather_kv", f"layout={layout}", "cluster.world_size=4", "seq_len=256")
    areas = [sum(block.area for _, block in blocks_of(cell, rank)) for rank in range(4)]
    assert max(areas) == areas[-1]
