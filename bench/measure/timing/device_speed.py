"""Speed of plain matrix products on this rank's device, which no step can exceed by much."""

from __future__ import annotations

import time

import torch

from bench.config import DTYPE_BYTES
from bench.measure.timing.clock import synchronise
from bench.ranks.memory_limit import without_memory_limit
from bench.training.models import TORCH_DTYPES

SIZES = {"cpu": 1024, "cuda": 4096}
"""Rows and columns of the matrices, by device."""
MEASURED_S = 0.1
"""Seconds of products in each dtype."""
ROUND = 3
"""Number of products that are timed together."""


def product_flops_per_s(dtype: str, device: torch.device) -> float | None:
    """Return the FLOP/s of the fastest products in the cell's dtype or float32; None if memory lacks room."""
    size, fastest = SIZES[device.type], 0.0
    wide = "fp32" if DTYPE_BYTES[dtype] < DTYPE_BYTES["fp32"] else dtype
    with without_memory_limit(), torch.no_grad():
        for name in {dtype, wide}:
            try:
                a, b = (torch.ones(size, size, dtype=TORCH_DTYPES[name], device=device) for _ in range(2))
                torch.mm(a, b)
                end = time.perf_counter() + MEASURED_S
                while time.perf_counter() < end:
                    synchronise(device)
                    start = time.perf_counter()
                    for _ in range(ROUND):
                        torch.mm(a, b)
                    synchronise(device)
                    seconds = time.perf_counter() - start
                    fastest = max(fastest, 2 * ROUND * size**3 / seconds)
            except torch.OutOfMemoryError:
                return None
    return fastest
