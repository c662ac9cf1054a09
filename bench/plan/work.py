"""Work of a cell: cells of equal work train on equal tokens from equal parameters; their losses compare."""

from __future__ import annotations

import json

from bench.config import Cell
from bench.measure.objective.section import objective_tokens
from bench.measure.timing.section import first_step_tokens
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import is_stack

REFERENCE_STRATEGY = "local"
"""Strategy of references, in which each device holds whole sequences and attention does not communicate."""
MAX_COMPARED_STEPS = 20
"""Largest number of full-length steps in which the losses of two cells are compared.

When the gradient norm of a training spikes, rounding errors grow faster than the random walk that the limits
allow: sound 16-bit cells of 256 and 512 tokens were within a tenth of their limits in the first 20 steps, and
beyond them from step 26 on.
"""
WORK_FIELDS = ("seq_len", "model", "data", "seed", "dtype", "engine", "optimizer", "env", "quality")
"""Fields of a cell that define the tokens and the parameters of its training."""


def is_base(cell: Cell) -> bool:
    """Return whether a cell is a base, with which other cells are compared: `local` in our own loop."""
    return cell.strategy == REFERENCE_STRATEGY and not is_stack(cell.trainer)


def work_of(cell: Cell) -> str:
    """Return a text that is equal for two cells exactly if they train on the same tokens and parameters."""
    fields = cell.identity()
    multiple = STRATEGIES[cell.strategy].length_multiple(cell)
    work = {name: fields.get(name) for name in WORK_FIELDS}
    work["data"] = {key: value for key, value in fields["data"].items() if key != "rank_order"}
    extra = {
        "sequences_per_step": cell.sequences_per_step,
        "objective_tokens": min(objective_tokens(cell.padded_len, multiple), cell.seq_len),
        "first_step_tokens": min(first_step_tokens(cell.padded_len, multiple), cell.seq_len),
    }
    return json.dumps({**work, **extra}, sort_keys=True)
