"""Payload bytes and messages of one rank in one step.

The formulas are for the native trainer, because other trainers communicate losses and numbers of tokens in
other ways. The formulas do not hold for the first steps: DDP sets up its buckets in the first two steps, and
ZeRO-3 gathers more in the first two micro-steps, in which it records the order of modules. Bytes of attention
are exact. Bytes of parameters and gradients are estimates, as engines may cache and bundle.
"""

from __future__ import annotations

import itertools
from collections import Counter

from bench.config import NOT_USED, Cell
from bench.strategies import STRATEGIES
from bench.training.engines import ENGINE_FACTS
from bench.training.messages import ATTENTION, DATA_AND_LOSS, GRADIENTS, PARAMETERS, Messages, all_reduce
from bench.training.trainer_facts import NATIVE

COUNT_BYTES = 8
"""Size of the number of valid tokens, which ranks sum with an all-reduce."""


def payload(cell: Cell) -> dict[str, int] | None:
    """Return the bytes that one rank sends in one step, by purpose.

    The result is None without a formula: for an unknown strategy, and for training with an unknown engine or
    with another trainer than native.
    """
    facts, engine = STRATEGIES.get(cell.strategy), cell.engine.name
    has_formula = engine == NOT_USED or (engine in ENGINE_FACTS and cell.trainer == NATIVE)
    if facts is None or not has_formula:
        return None
    sent = Counter({ATTENTION: facts.communication_bytes(cell)})
    for message in messages(cell):
        sent[message.purpose] += message.sent_bytes
    return {purpose: sent[purpose] for purpose in (ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS)}


def messages(cell: Cell) -> tuple[Messages, ...]:
    """Return the messages of one step except those of attention; empty for an engine outside the table."""
    engine = ENGINE_FACTS.get(cell.engine.name)
    if engine is None:
        return ()
    valid_tokens = all_reduce(COUNT_BYTES, cell.cluster.world_size)
    sent = itertools.chain([valid_tokens], engine.messages(cell))
    counts = Counter((purpose, communication) for purpose, communication in sent if communication.ranks > 1)
    return tuple(
        Messages(purpose, communication, count) for (purpose, communication), count in counts.items()
    )
