"""Times attention and matrix products on this CPU: `python -m bench.extras.predict.cpu_probe`.

The plan starts it as a child process, so that the launcher itself runs no tensor operation. Asked for on
standard input and answered on standard output, both JSON: a list of `ProbeTask`, a list of `ProbeTimes`.
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
from bench.extras.predict.cpu_speed import LENGTH, ROWS, ProbeTask, ProbeTimes
from bench.ranks.products import use_wide_products


def main() -> None:
    """Answer the tasks, one after another."""
    tasks = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ProbeTask])
    # Forked before the first tensor operation: OpenMP's threads do not survive a fork.
    with_ranks = [_on_ranks(task) for task in tasks]
    sys.stdout.buffer.write(msgspec.json.encode(with_ranks))


def _on_ranks(task: ProbeTask) -> ProbeTimes:
    """The slowest of as many processes at a time as the cell has ranks here."""
    with multiprocessing.get_context("fork").Pool(task.ranks) as pool:
        found = pool.map(_times, [task] * task.ranks, chunksize=1)
    return ProbeTimes(
        attention_s=max(each.attention_s for each in found),
        products_s=max(each.products_s for each in found),
    )


def _times(task: ProbeTask) -> ProbeTimes:
    torch.set_num_threads(task.threads)
    products = use_wide_products()
    times = ProbeTimes(attention_s=_seconds(_attention(task)), products_s=_seconds(_products(task)))
    del products
    return times


def _attention(task: ProbeTask) -> Callable[[], object]:
    """Forward and backward of a head for each thread."""
    shape, dtype = (1, task.heads, LENGTH, task.head_dim), getattr(torch, TORCH_NAMES[task.dtype])
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.ones(shape, dtype=dtype)
    kernel = KERNELS[task.kernel]
    return lambda: attend(q, k, v, kernel=kernel, causal=True).backward(dout)


def _products(task: ProbeTask) -> Callable[[], object]:
    """A linear layer from the model's hidden size to its MLP's, forward and backward."""
    dtype = getattr(torch, TORCH_NAMES[task.dtype])
    x, weight = (
        torch.randn(size, task.hidden_size, dtype=dtype, requires_grad=True)
        for size in (ROWS, task.intermediate_size)
    )
    dout = torch.ones(ROWS, task.intermediate_size, dtype=dtype)
    return lambda: linear(x, weight).backward(dout)


def _seconds(call: Callable[[], object]) -> float:
    """The faster of two calls: the first also takes memory."""
    return min(timeit.repeat(call, number=1, repeat=2))


if __name__ == "__main__":
    main()
