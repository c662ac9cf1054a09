"""Kernel calls on gathered keys cover all tiles of the mask in the smallest number of calls."""

import pytest

from bench.attention.layouts import LAYOUTS
from bench.strategies.gather_kv.facts import calls_on_local_keys, calls_on_other_keys, planned_calls
from tests.support.cells import make_cell

SHARD = 8


def tiles_of(layout, rank):
    """Return a function from a source to the tiles that the mask leaves of its keys."""

    def tiles(source):
        tile = LAYOUTS[layout].causal_tile(SHARD, rank, source)
        return () if tile is None else (tile,)

    return tiles


def calls_of(layout, rank, ranks):
    tiles = tiles_of(layout, rank)
    return [*calls_on_local_keys(tiles, rank), *calls_on_other_keys(tiles, rank, ranks)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_kernel_calls_take_every_tile_of_the_mask_once(layout, ranks):
    for rank in range(ranks):
        calls = calls_of(layout, rank, ranks)
        computed = [(source, call.tile) for call in calls for source in range(ranks)[call.sources]]
        expected = [(source, tile) for source in range(ranks) for tile in tiles_of(layout, rank)(source)]
        assert sorted(computed, key=lambda pair: pair[0]) == expected
        assert all(call.ranks == 1 for call in calls if call.tile.causal)


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 2), ("zigzag", 3), ("striped", 8)])
def test_kernel_calls_join_ranks_except_for_triangles(layout, most):
    assert max(len(calls_of(layout, rank, 8)) for rank in range(8)) == most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_last_rank_whose_schedule_counts_has_the_largest_area(layout):
    cell = make_cell("strategy=gather_kv", f"layout={layout}", "cluster.world_size=4", "seq_len=256")
    areas = [sum(call.block.area for call in planned_calls(cell, rank)) for rank in range(4)]
    assert max(areas) == areas[-1]
