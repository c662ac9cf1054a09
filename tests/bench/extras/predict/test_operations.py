"""The FLOPs of the operations equal those of the FLOP formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.cost.flops import hardware_flops
from bench.extras.predict.operations import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    block_flops,
    micro_step_operations,
    unfused_block,
)
from bench.strategies import STRATEGIES
from bench.strategies.ring_self_attention.attention import block_backward
from bench.strategies.schedule import Block
from tests.support.cells import make_cell

CELLS = [
    ("strategy=ulysses",),
    ("strategy=ulysses", "checkpointing=true", "loss=untiled", "grad_accum=2"),
    ("strategy=usp", "ulysses_degree=1", "model=qwen3_0_6b", "batch=2"),
    ("strategy=local", "dp_shard=2", "tiled_mlp=true"),
    ("strategy=local", "dp_shard=2", "tiled_mlp=true", "checkpointing=true", "engine=zero3"),
]


def computed_flops(cell):
    """Return the FLOPs of one rank; all ranks have equal workloads in these cells."""
    schedule = STRATEGIES[cell.strategy].schedule(cell)
    products = sum(operation.count * operation.flops for operation in micro_step_operations(cell))
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


def test_unfused_block_has_the_products_of_ring_self_attention():
    kv_heads, groups, queries, keys, head_dim = 2, 3, 8, 6, 4
    rows = torch.randn(1, kv_heads, groups, queries, head_dim)
    key_rows = torch.randn(1, kv_heads, keys, head_dim)
    probs = torch.rand(1, kv_heads, groups, queries, keys)
    with FlopCounterMode(display=False) as counted:
        block_backward((rows, rows, rows[..., :1]), (key_rows, key_rows), probs)
    block = Block(1, kv_heads * groups, kv_heads, queries, keys, is_causal=True)
    operations = unfused_block(block, head_dim, 4, backward=True)
    assert counted.get_total_flops() == sum(operation.count * operation.flops for operation in operations)
