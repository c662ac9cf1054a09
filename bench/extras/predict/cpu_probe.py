"""Command that times attention and matrix products on this CPU: `python -m bench.extras.predict.cpu_probe`.

The plan starts it as a child process, so that the launcher itself runs no tensor operation. It reads a list
of `ProbeTask` as JSON from standard input and writes a list of `ProbeTimes` as JSON to standard output.
"""

from __future__ import annotations

import multiprocessing
import sys
import timeit
from collections.abc import Callable

import msgspec
import torch
from torch.nn.functional import linear

from bench.attention.kernels import KERNELS, attend
from bench.common.cpu_arithmetic import TORCH_NAMES
from bench.extras.predict.cpu_speed import ATTENTION_TOKENS, LINEAR_ROWS, ProbeTask, ProbeTimes
from bench.ranks.products import use_wide_products


def main() -> None:
    """Time the tasks from standard input one after another, and write their times."""
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ProbeTask])
    # This process forks, so it must run no tensor operation: OpenMP's threads do not survive a fork.
    times = [_slowest_rank(task) for task in tasks]
    sys.stdout.buffer.write(msgspec.json.encode(times))


def _slowest_rank(task: ProbeTask) -> ProbeTimes:
    """Return the longest times of `task.ranks` processes that run the task at the same time."""
    with multiprocessing.get_context("fork").Pool(task.ranks) as pool:
        by_rank = pool.map(_time_task, [task] * task.ranks, chunksize=1)
    return ProbeTimes(
        attention_s=max(times.attention_s for times in by_rank),
        products_s=max(times.products_s for times in by_rank),
    )


def _time_task(task: ProbeTask) -> ProbeTimes:
    torch.set_num_threads(task.threads)
    wide_products = use_wide_products()  # in effect while this object exists
    times = ProbeTimes(
        attention_s=_fastest_s(_attention_call(task)), products_s=_fastest_s(_linear_call(task))
    )
    del wide_products
    return times


def _attention_call(task: ProbeTask) -> Callable[[], object]:
    """Return a function that runs forward and backward of causal attention on the task's heads."""
    shape, dtype = (1, task.heads, ATTENTION_TOKENS, task.head_dim), getattr(torch, TORCH_NAMES[task.dtype])
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.ones(shape, dtype=dtype)
    kernel = KERNELS[task.kernel]
    return lambda: attend(q, k, v, kernel=kernel, causal=True).backward(dout)


def _linear_call(task: ProbeTask) -> Callable[[], object]:
    """Return a function that runs forward and backward of a linear layer from hidden size to MLP size."""
    dtype = getattr(torch, TORCH_NAMES[task.dtype])
    x, weight = (
        torch.randn(size, task.hidden_size, dtype=dtype, requires_grad=True)
        for size in (LINEAR_ROWS, task.intermediate_size)
    )
    dout = torch.ones(LINEAR_ROWS, task.intermediate_size, dtype=dtype)
    return lambda: linear(x, weight).backward(dout)


def _fastest_s(call: Callable[[], object]) -> float:
    """Return the seconds of the faster of two calls; the first call also allocates memory."""
    return min(timeit.repeat(call, number=1, repeat=2))


if __name__ == "__main__":
    main()
