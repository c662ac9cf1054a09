"""Collectives by kind and size, what of a message a kernel hides, all between the ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.kernels import KERNELS, kernel_forward
from bench.attention.rotation import rotate
from bench.calibrate.case import Call, Case
from bench.calibrate.grid import Grid
from bench.training.models import TORCH_DTYPES

REDUCED, REDUCED_DTYPES = ("reduce_scatter", "all_reduce"), ("bf16", "fp32")
"""In which gradients travel: adding them up takes a time that depends on it."""
HIDDEN_MESSAGE_BYTES = 2**22
HIDDEN_TOKENS = 2048


def exchange_cases(grid: Grid, device: torch.device) -> Iterator[Case]:
    """(bytes that leave this rank,) of every kind of message."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return
    for kind, make in EXCHANGES.items():
        for name in REDUCED_DTYPES if kind in REDUCED else ("any",):
            dtype = TORCH_DTYPES.get(name, torch.bfloat16)
            for size in grid.messages:
                yield Case(kind, name, (size,), partial(make, size, ranks, dtype, device))


def hidden_cases(kernel: str, dtype: str, device: torch.device) -> Iterator[Case]:
    """A message alone, a kernel alone, and both at once."""
    if dist.get_world_size() > 1:
        for name, with_message, with_kernel in (
            ("hidden_message", True, False),
            ("hidden_kernel", False, True),
            ("hidden_both", True, True),
        ):
            make = partial(_beside, kernel, dtype, device, with_message, with_kernel)
            yield Case(name, dtype, (HIDDEN_MESSAGE_BYTES,), make)


def _all_to_all(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:
    """Each rank keeps its own part."""
    sent = _buffer(size * ranks // (ranks - 1), ranks, dtype, device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent)


def _send(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:  # noqa: ARG001
    sent = _buffer(size, 1, dtype, device)
    group = dist.group.WORLD
    assert group is not None
    return lambda: rotate(sent, group).wait()


def _all_gather(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:
    """A shard reaches all others."""
    shard = _buffer(size // (ranks - 1), 1, dtype, device)
    whole = torch.empty(ranks * len(shard), dtype=dtype, device=device)
    return lambda: dist.all_gather_into_tensor(whole, shard)


def _reduce_scatter(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:
    whole = _buffer(size * ranks // (ranks - 1), ranks, dtype, device)
    shard = torch.empty(len(whole) // ranks, dtype=dtype, device=device)
    return lambda: dist.reduce_scatter_tensor(shard, whole)


def _all_reduce(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:
    """Twice (P-1)/P of the tensor leave a rank."""
    whole = _buffer(size * ranks // (2 * (ranks - 1)), ranks, dtype, device)
    return lambda: dist.all_reduce(whole)


def _broadcast(size: int, ranks: int, dtype: torch.dtype, device: torch.device) -> Call:  # noqa: ARG001
    whole = _buffer(size, 1, dtype, device)
    return lambda: dist.broadcast(whole, src=0)


EXCHANGES: Mapping[str, Callable[[int, int, torch.dtype, torch.device], Call]] = {
    "all_to_all": _all_to_all,
    "send": _send,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def _beside(kernel: str, dtype: str, device: torch.device, with_message: bool, with_kernel: bool) -> Call:
    sent = _buffer(HIDDEN_MESSAGE_BYTES, 1, TORCH_DTYPES[dtype], device)
    q, k, v = (torch.randn(1, 4, HIDDEN_TOKENS, 64, device=device).to(TORCH_DTYPES[dtype]) for _ in range(3))
    group = dist.group.WORLD
    assert group is not None

    def run() -> None:
        arriving = rotate(sent, group) if with_message else None
        if with_kernel:
            kernel_forward(KERNELS[kernel], q, k, v, causal=True, scale=0.125)
        if arriving is not None:
            arriving.wait()

    return run


def _buffer(size: int, multiple: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As many numbers as `size` bytes hold, in whole shares."""
    numbers = max(1, size // dtype.itemsize // multiple) * multiple
    return torch.zeros(numbers, dtype=dtype, device=device)
