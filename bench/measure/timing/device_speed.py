"""Speed of plain matrix products on this rank's device, which no step can exceed by much."""

from __future__ import annotations

import time

import torch

from bench.config import DTYPE_BYTES
from bench.measure.timing.clock import synchronise
from bench.ranks.memory_limit import without_memory_limit
from bench.training.models import TORCH_DTYPES

SIZES = (256, 512, 1024, 2048, 4096)
"""Rows and columns of the matrices, up to the first product that takes LONG_PRODUCT_S."""
LONG_PRODUCT_S = 0.02
"""Seconds of a product that is large enough; starting two threads takes up to 0.01 s on a busy host."""
MEASURED_S = 0.03
"""Seconds of products of each size."""


def product_flops_per_s(dtype: str, device: torch.device) -> float | None:
    """Return the FLOP/s of the fastest products in the cell's dtype or float32; None if memory lacks room."""
    fastest = 0.0
    wide = "fp32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["fp32"] else dtype
    with without_memory_limit(), torch.no_grad():
        for name in {dtype, wide}:
            for size in SIZES:
                try:
                    seconds = _fastest_product_s(size, TORCH_DTYPES[name], device)
                except torch.OutOfMemoryError:
                    return None
                fastest = max(fastest, 2 * size**3 / seconds)
                if seconds >= LONG_PRODUCT_S:
                    break
    return fastest


def _fastest_product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    torch.mm(a, b)
    times_s, end = list[float](), time.perf_counter() + MEASURED_S
    while not times_s or time.perf_counter() < end:
        synchronise(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronise(device)
        times_s.append(time.perf_counter() - start)
    return min(times_s)
