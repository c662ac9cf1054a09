"""How fast this CPU is, compared with the one of conf/hardware/cpu.yaml, measured in about a second.

The cost model says how a step's parts grow with its sizes; a probe of this machine says how much longer
attention, and all else, takes here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from bench.common.environment import REPOSITORY
from bench.config import DTYPE_BYTES, Cell
from bench.cost.band import End
from bench.extras.predict.hardware_file import Hardware
from bench.extras.predict.operations import Operation
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import PredictedParts
from bench.strategies.schedule import Block

LENGTH, ROWS = 4096, 8192
"""Of the timed attention and of the timed linear layer: longer ones run at their rates."""
LARGEST_HEAD_DIM, LARGEST_PRODUCT = 256, 2**22
"""Larger models are not probed: it would take longer than a person waits for a plan."""
MOST_TASKS = 6
"""Of a plan whose cells ask for more none is timed: a dozen take half a minute."""
TIMEOUT_S = 20.0
PRODUCTS = 3
"""A linear layer's forward, and the two of its backward."""


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """What is timed: one rank's attention and products, on as many processes as a cell has ranks here."""

    ranks: int
    threads: int
    heads: int
    """That one rank computes at a time, on a thread each."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    kernel: str

    @classmethod
    def of(cls, cell: Cell) -> ProbeTask:
        """That of a cell on CPU ranks."""
        model = cell.model
        return cls(
            ranks=len(cell.running_ranks) // cell.cluster.nodes,
            threads=cell.cluster.threads_per_rank,
            heads=min(cell.cluster.threads_per_rank, heads_of_call(cell)),
            head_dim=model.head_dim,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            dtype=cell.dtype,
            kernel=cell.kernel,
        )

    @property
    def is_quick(self) -> bool:
        """Whether it takes about a second."""
        product = self.hidden_size * self.intermediate_size
        return self.head_dim <= LARGEST_HEAD_DIM and product <= LARGEST_PRODUCT


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Seconds of forward and backward."""

    attention_s: float
    """Of the task's heads."""
    products_s: float
    """Of one linear layer."""


def heads_of_call(cell: Cell) -> int:
    """Query heads that one call of attention computes on a rank."""
    return cell.model.num_heads // cell.ulysses_degree


def probed(tasks: Iterable[ProbeTask]) -> dict[ProbeTask, ProbeTimes]:
    """What a child process measured of these tasks.

    Nothing where it fails, or where there are more than MOST_TASKS: a plan can do without.
    """
    asked = [*dict.fromkeys(task for task in tasks if task.is_quick)]
    if not 0 < len(asked) <= MOST_TASKS:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.extras.predict.cpu_probe"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.fspath(REPOSITORY)},
            input=msgspec.json.encode(asked),
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        times = msgspec.json.decode(done.stdout, type=list[ProbeTimes])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return {}
    return dict(zip(asked, times, strict=True))


def seconds_here(cell: Cell, parts: PredictedParts, other_cpu: Hardware, times: ProbeTimes) -> float:
    """Return the seconds of a step here; `parts` are those of one thread of the other CPU."""
    speeds, task, e = Speeds(other_cpu, End.EXPECTED), ProbeTask.of(cell), DTYPE_BYTES[cell.dtype]
    block = Block(1, 1, 1, LENGTH, LENGTH, is_causal=True)
    head_s = sum(
        speeds.block_s(block, task.head_dim, cell.kernel, number_bytes=e, backward=each)
        for each in (False, True)
    )
    product = Operation("product", ROWS, task.intermediate_size, task.hidden_size, e)
    heads = heads_of_call(cell)
    rounds_of_a_head = -(-heads // task.heads) / heads
    attention = times.attention_s / head_s * rounds_of_a_head
    rest = times.products_s / (PRODUCTS * speeds.operation_s(product))
    return (parts.attention_ms * attention + (parts.step_ms - parts.attention_ms) * rest) / 1e3
