"""Dtype in which CPU ranks compute products of 16-bit numbers.

On a CPU without 16-bit instructions, torch multiplies 16-bit numbers one by one. With AVX2 a matrix product
takes ten times as long in bf16 as in float32. CPU ranks therefore compute in float32, in which a GPU's tensor
cores accumulate as well, and round the results once.
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
"""Environment variable that limits the instruction set of torch's CPU code."""
TORCH_NAMES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
"""torch's name of each dtype of a cell."""
NEEDED_FLAGS = frozenset({"avx512vl", "avx512bw", "avx512dq", "avx512_bf16"})
"""Flags in /proc/cpuinfo of a CPU on which torch has bf16 instructions."""


def cpu_arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which CPU ranks multiply numbers of `dtype`.

    It is float32 for a 16-bit dtype for which the CPU has no instructions.
    """
    import torch

    return torch.float32 if dtype in _without_instructions() else dtype


@cache
def _without_instructions() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes for which this CPU has no instructions."""
    import torch

    is_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    has_instructions = {
        torch.bfloat16: is_avx512 and torch.cpu._is_avx512_bf16_supported(),
        torch.float16: is_avx512 and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_supported in has_instructions.items() if not is_supported)


@cache
def estimated_bf16_instructions() -> bool:
    """Return whether this CPU has bf16 instructions, estimated without torch.

    Only estimates of memory use it. Ranks ask `cpu_arithmetic`.
    """
    if not os.environ.get(CAPABILITY, "avx512").lower().startswith("avx512"):
        return False
    try:
        match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match is not None and NEEDED_FLAGS.issubset(match[1].split())
