"""Bytes and messages of one rank in one step.

The trainer is ours: training stacks count losses and tokens in their own way. The step is one of many: DDP
sets up its buckets in its first two, and ZeRO-3 looks at the order of modules in the first two micro-steps
that have it, in which it gathers more. Attention's bytes are exact; those of parameters and gradients are
estimates, as engines may cache and bundle.
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


def payload(cell: Cell) -> dict[str, int] | None:
    """Return the bytes that one rank sends in one step, by purpose; None where no formula is known."""
    facts, engine = STRATEGIES.get(cell.strategy), cell.engine.name
    has_formula = engine == NOT_USED or (engine in ENGINE_FACTS and cell.trainer == NATIVE)
    if facts is None or not has_formula:
        return None
    sent = Counter({ATTENTION: facts.communication_bytes(cell)})
    for each in messages(cell):
        sent[each.purpose] += each.sent_bytes
    return {purpose: sent[purpose] for purpose in (ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS)}


def messages(cell: Cell) -> tuple[Messages, ...]:
    """Return the messages of a step without those of attention; empty for an engine outside the table."""
    engine = ENGINE_FACTS.get(cell.engine.name)
    if engine is None:
        return ()
    counted = all_reduce(COUNT_BYTES, cell.cluster.world_size)  # of valid tokens
    sent = Counter(each for each in itertools.chain([counted], engine.messages(cell)) if each[1].ranks > 1)
    return tuple(Messages(*each, count) for each, count in sent.items())
