"""Cells that do the same work: they train on the same tokens from the same parameters."""

from __future__ import annotations

import json

from bench.config import Cell
from bench.measure.objective.section import objective_tokens
from bench.measure.timing.section import first_step_tokens
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import is_stack

REFERENCE_STRATEGY = "local"
"""Takes the place of any other reference: one device, nothing exchanged."""
MAX_COMPARED_STEPS = 20
"""Full-length steps of two cells that are compared. Where the gradient norm of a training spikes, rounding
grows faster than the random walk that limits allow: sound 16-bit cells of 256 and 512 tokens were within a
tenth of their limits in the first 20 steps, and beyond them from step 26 on."""
DECIDES = ("seq_len", "model", "data", "seed", "dtype", "engine", "optimizer", "env")
"""Of a cell's fields those that decide what it trains on and from what."""


def is_base(cell: Cell) -> bool:
    """Whether it is what all others are compared with: one device, and the loop is ours."""
    return cell.strategy == REFERENCE_STRATEGY and not is_stack(cell.trainer)


def work_of(cell: Cell) -> str:
    """Equal for two cells exactly when their steps train on the same tokens from the same parameters."""
    fields = cell.identity()
    multiple = STRATEGIES[cell.strategy].length_multiple(cell)
    decides = {name: fields[name] for name in DECIDES}
    decides["data"] = {key: value for key, value in fields["data"].items() if key != "rank_order"}
    extra = {
        "sequences_per_step": cell.sequences_per_step,
        "gradients": cell.measure.gradients,
        "objective_tokens": min(objective_tokens(cell.padded_len, multiple), cell.seq_len),
        "first_step_tokens": min(first_step_tokens(cell.padded_len, multiple), cell.seq_len),
    }
    return json.dumps({**decides, **extra}, sort_keys=True)
