"""One thing whose time is taken, and how it is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.cost.band import Band
from bench.passes.timing.clock import synchronise

Call = Callable[[], object]
"""What is timed: everything that it needs is there already."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that needs something before each time."""

    run: Call
    before: Call = lambda: None
    """Not timed."""


LEAST_CALLS = 4
SHORT_S = 0.02
"""Seconds over which a case is repeated at least, if MOST_CALLS do not come first."""
MOST_CALLS = 25
LONG_CALL_S = 0.2
"""A call that takes longer is made LONG_CALLS times."""
LONG_CALLS = 3
SPREAD_SHARE = 10
"""The ends leave a tenth of the calls out on either side."""


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of a table."""

    table: str
    """A name that the cost model asks for."""
    dtype: str
    """`any` where it makes no difference."""
    sizes: tuple[int, ...]
    prepare: Callable[[], Call | Prepared]
    """Makes the inputs."""
    parts: int = 1
    """Equal parts of a call; the time of one is kept."""


def timed(case: Case, device: torch.device) -> Band:
    """Seconds of one call: median and spread over several, which all ranks begin together.

    The first call, which pays for what happens once, does not count. All ranks make as many calls: a rank
    that has stopped would leave the others in a collective.
    """
    made = case.prepare()
    call = made if isinstance(made, Prepared) else Prepared(made)
    _seconds(call, device)
    samples = [_seconds(call, device)]
    samples += [_seconds(call, device) for _ in range(_calls(samples[0], device) - 1)]
    samples.sort()
    rest = len(samples) // SPREAD_SHARE
    ends = samples[rest], samples[len(samples) // 2], samples[-1 - rest]
    return Band(*(each / case.parts for each in ends))


def _calls(call_s: float, device: torch.device) -> int:
    """How many calls are counted, the same on all ranks: by the slowest of them."""
    slowest = torch.tensor([call_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    took_s = float(slowest)
    if took_s > LONG_CALL_S:
        return LONG_CALLS
    return max(LEAST_CALLS, min(MOST_CALLS, round(SHORT_S / max(took_s, 1e-9))))


def _seconds(call: Prepared, device: torch.device) -> float:
    call.before()
    dist.barrier()
    start = time.perf_counter()
    call.run()
    synchronise(device)
    return time.perf_counter() - start
