"""The list of operations computes what the FLOP formulas count."""

import pytest

from bench.cost.flops import hardware_flops
from bench.cost.operations import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    KINDS,
    block_flops,
    micro_step,
)
from bench.strategies import STRATEGIES
from tests.cells import make_cell

CELLS = [
    ("strategy=ulysses",),
    ("strategy=ulysses", "checkpointing=true", "loss=untiled", "grad_accum=2"),
    ("strategy=usp", "ulysses_degree=1", "model=qwen3_0_6b", "batch=2"),
    ("strategy=local", "dp_shard=2", "tiled_mlp=true"),
]


def computed_flops(cell):
    """Of one rank, which has as much to do as any other in these cells."""
    schedule = STRATEGIES[cell.strategy].schedule(cell)
    products = sum(each.count * KINDS[each.kind].flops(each) for each in micro_step(cell))
    forwards = 2 if cell.checkpointing else 1
    attention = sum(
        times * block_flops(block, cell.model.head_dim, factor)
        for stages, factor, times in (
            (schedule.forward, FORWARD_PRODUCTS, forwards),
            (schedule.backward, BACKWARD_PRODUCTS, 1),
        )
        for stage in stages
        for block in stage.blocks
    )
    return cell.grad_accum * (products + cell.model.num_layers * attention)


@pytest.mark.parametrize("words", CELLS)
def test_products_and_blocks_add_up_to_the_executed_flops(words):
    cell = make_cell("seq_len=4k", "cluster.world_size=2", *words)
    assert cell.cluster.world_size * computed_flops(cell) == hardware_flops(cell, causal=True)
