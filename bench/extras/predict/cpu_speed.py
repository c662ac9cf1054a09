"""Speed of this CPU relative to the CPU of conf/hardware/cpu.yaml, from a probe of about a second.

The cost model gives the time of a step's parts on the CPU of the file, for every size. The probe gives two
factors by which this CPU takes longer, one for attention and one for everything else.
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
from bench.cost.band import BandEnd
from bench.extras.predict.hardware_file import Hardware
from bench.extras.predict.operations import Operation
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import PredictedParts
from bench.strategies.schedule import Block

ATTENTION_TOKENS, LINEAR_ROWS = 4096, 8192
"""Tokens of the timed attention, and rows of the timed linear layer. Larger sizes run at the same rates."""
MAX_HEAD_DIM, MAX_LINEAR_WEIGHTS = 256, 2**22
"""Largest head size and linear layer that are probed; with larger ones a plan would take too long."""
MAX_TASKS = 6
"""Largest number of tasks. A plan with more runs no probe, because a dozen tasks take half a minute."""
TIMEOUT_S = 20.0
LINEAR_PRODUCTS = 3
"""Matrix products of a linear layer: one in forward, two in backward."""


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """Sizes of the attention and the linear layer that the probe times."""

    ranks: int
    """Number of rank processes that run at the same time."""
    threads: int
    """Number of threads of a rank."""
    heads: int
    """Number of heads that a rank computes at the same time, one on each thread."""
    head_dim: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    kernel: str

    @classmethod
    def for_cell(cls, cell: Cell) -> ProbeTask:
        """Return the task of a cell on CPU ranks."""
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
        """Whether the task takes about a second."""
        weights = self.hidden_size * self.intermediate_size
        return self.head_dim <= MAX_HEAD_DIM and weights <= MAX_LINEAR_WEIGHTS


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Seconds of forward and backward of a task, on its slowest rank."""

    attention_s: float
    """Seconds of attention on the task's heads."""
    products_s: float
    """Seconds of one linear layer."""


def heads_of_call(cell: Cell) -> int:
    """Return the number of query heads that one call of attention computes on a rank."""
    return cell.model.num_heads // cell.ulysses_degree


def run_probe(tasks: Iterable[ProbeTask]) -> dict[ProbeTask, ProbeTimes]:
    """Return the times of the quick tasks, measured in a child process.

    A plan does not need the probe, so the result is empty if the process fails or if there are more than
    MAX_TASKS quick tasks.
    """
    quick = [*dict.fromkeys(task for task in tasks if task.is_quick)]
    if not 0 < len(quick) <= MAX_TASKS:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.extras.predict.cpu_probe"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.fspath(REPOSITORY)},
            input=msgspec.json.encode(quick),
            capture_output=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        times = msgspec.json.decode(done.stdout, type=list[ProbeTimes])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return {}
    return dict(zip(quick, times, strict=True))


def step_s_on_this_cpu(cell: Cell, parts: PredictedParts, other_cpu: Hardware, times: ProbeTimes) -> float:
    """Return the seconds of one step of a cell on this CPU.

    Args:
        cell: Cell on CPU ranks.
        parts: Predicted parts of its step on one thread of `other_cpu`.
        other_cpu: Rates of one thread of the CPU of conf/hardware/cpu.yaml.
        times: Times of the cell's `ProbeTask` on this CPU.
    """
    speeds, task = Speeds(other_cpu, BandEnd.EXPECTED), ProbeTask.for_cell(cell)
    dtype_bytes = DTYPE_BYTES[cell.dtype]
    block = Block(1, 1, 1, ATTENTION_TOKENS, ATTENTION_TOKENS, is_causal=True)
    head_s = sum(
        speeds.block_s(block, task.head_dim, cell.kernel, number_bytes=dtype_bytes, backward=backward)
        for backward in (False, True)
    )
    product = Operation("product", LINEAR_ROWS, task.intermediate_size, task.hidden_size, dtype_bytes)
    heads = heads_of_call(cell)
    rounds_per_head = -(-heads // task.heads) / heads
    attention_factor = times.attention_s / head_s * rounds_per_head
    other_factor = times.products_s / (LINEAR_PRODUCTS * speeds.operation_s(product))
    other_ms = parts.step_ms - parts.attention_ms
    return (parts.attention_ms * attention_factor + other_ms * other_factor) / 1e3
