"""Whether torch's CPU code has instructions for products of 16-bit numbers, and what it computes in if not.

Without them torch multiplies number by number: on a CPU with AVX2 a matrix product in bf16 takes ten times as
long as in float32. CPU ranks then compute in float32 and round results once, as tensor cores accumulate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CAPABILITY = "ATEN_CPU_CAPABILITY"
"""torch's variable that limits the instructions of its own CPU code."""
TORCH_NAMES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
"""What torch calls a cell's dtype."""
NEEDED_FLAGS = frozenset({"avx512vl", "avx512bw", "avx512dq", "avx512_bf16"})


def cpu_arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products on the CPU of numbers of `dtype`: float32 for 16 bits without instructions."""
    import torch

    return torch.float32 if dtype in _without_instructions() else dtype


@cache
def _without_instructions() -> frozenset[torch.dtype]:
    import torch

    is_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    has = {
        torch.bfloat16: is_avx512 and torch.cpu._is_avx512_bf16_supported(),
        torch.float16: is_avx512 and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_there in has.items() if not is_there)


@cache
def estimated_bf16_instructions() -> bool:
    """What `cpu_arithmetic` will find for bf16, without importing torch: for estimates of memory only."""
    if not os.environ.get(CAPABILITY, "avx512").lower().startswith("avx512"):
        return False
    try:
        match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match is not None and NEEDED_FLAGS.issubset(match[1].split())
