"""Random inputs of the calls of attention alone; each call has other inputs, so that no result can be kept.

The inputs of two calls share memory: those of call n begin n rows later. Shapes: B sequences, S tokens of a
shard, T of a sequence, D size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.config import Cell
from bench.measure.timing.section import MAX_WARM_UP_STEPS
from bench.strategies.strategy import Strategy
from bench.training.models import TORCH_DTYPES

SEED = 7
LATER_CALLS = 16
"""Calls in addition to the warm-up and the timed calls for which there are inputs."""


def number_of_calls(cell: Cell) -> int:
    """Return the number of calls with different inputs."""
    return cell.measure.steps + MAX_WARM_UP_STEPS + LATER_CALLS


def random_rows(cell: Cell, index: int, group_rank: int, device: torch.device) -> Tensor:
    """Return a rank's rows of q, k, v or the output's gradient, `index` 0 to 3, [B * S + calls, heads, D]."""
    model = cell.model
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)[index]
    generator = torch.Generator(device).manual_seed(SEED + index + 4 * group_rank)
    shape = (cell.batch * cell.shard_len + number_of_calls(cell), heads, model.head_dim)
    return torch.randn(shape, generator=generator, dtype=TORCH_DTYPES[cell.dtype], device=device)


def shard_of_call(cell: Cell, rows: Tensor, call: int) -> Tensor:
    """Return the input of a call as a view of `rows`, [B, heads, S, D], with the strides of a model's q."""
    first = call % number_of_calls(cell)
    tokens = rows[first : first + cell.batch * cell.shard_len]
    return tokens.view(cell.batch, cell.shard_len, *rows.shape[1:]).transpose(1, 2)


def whole_input(strategy: Strategy, index: int, call: int, device: torch.device) -> Tensor:
    """Return the input of a call for whole sequences, [B, heads, T, D], made of the shards of all ranks."""
    cell = strategy.cell
    rows = (random_rows(cell, index, rank, device) for rank in range(cell.sp_degree))
    return strategy.unshard([shard_of_call(cell, x, call).transpose(1, 2) for x in rows]).transpose(1, 2)
