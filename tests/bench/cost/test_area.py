"""The causal work of a rank is counted token by token where that is cheap."""

import pytest

from bench.cost.area import causal_area
from bench.strategies import STRATEGIES
from tests.support.cells import make_cell


def areas(*words):
    cell = make_cell(*words, "cluster.world_size=4", "seq_len=64")
    return cell, [causal_area(cell, rank) for rank in range(4)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_rings_area_is_the_keys_that_its_own_queries_see(layout):
    cell, found = areas("strategy=ring", f"layout={layout}")
    facts = STRATEGIES["ring"]
    counted = [
        sum(position + 1 for piece in facts.slices(cell, 64, rank) for position in range(64)[piece])
        for rank in range(4)
    ]
    assert found == [cell.model.num_heads * pairs for pairs in counted]


def test_ranks_that_share_heads_have_one_area_wherever_they_stand():
    words = ("strategy=usp", "ulysses_degree=2", "layout=contiguous")
    by_inner = {}
    for inner in ("ulysses", "ring"):
        cell, by_inner[inner] = areas(*words, f"strategy.inner={inner}")
        assert sum(by_inner[inner]) == cell.model.num_heads * 64 * 65 // 2
    first, _, last, _ = by_inner["ulysses"]
    assert by_inner == {"ulysses": [first, first, last, last], "ring": [first, last, first, last]}
    assert first < last
