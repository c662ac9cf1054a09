"""Markers, skips and cells for tests on one GPU."""

from dataclasses import replace

import pytest
import torch

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.common.environment import this_machine
from bench.request.legality import refusal
from tests.support.cells import ONE_H200, make_cell, run_cell

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
)
GPU_KERNELS = [name for name, facts in KERNEL_FACTS.items() if "cuda" in facts.dtypes]
MACHINE = replace(this_machine(), gpus=this_machine().gpus[:1]) if this_machine().gpus else ONE_H200
"""Machine with only its first GPU, so that tests do the same on every machine."""

SOON_OVER = ("measure.timeout_s=120",)
"""Time limit that ends ranks which wait for each other in vain, long before the default of half an hour."""
NOT_TIMED = ("measure.warmup_s=0",)
"""Words of cells whose times do not matter, so that the GPU need not be warmed up."""
OUT_OF_MEMORY_IN = "timing"
"""Phase in which a rank runs out of memory at full length; a test on the CPU checks it, too."""


def needs_gpu(test):
    """Mark a single test of a file whose other tests run anywhere."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def available(kernel, device):
    """Return whether a kernel runs here on "cpu" or "cuda", by its facts, without importing its package."""
    facts = KERNEL_FACTS[kernel]
    if device not in facts.dtypes or not facts.is_installed:
        return False
    return device == "cpu" or (torch.cuda.is_available() and has_capability(facts.capabilities))


def has_capability(capabilities):
    return not capabilities or torch.cuda.get_device_capability()[0] in capabilities


def skip_without(kernel, device="cuda"):
    """Skip the test if this device or its software does not have the kernel."""
    if not available(kernel, device):
        pytest.skip(
            f"{kernel} needs a {KERNEL_FACTS[kernel].required_gpu} and {KERNEL_FACTS[kernel].package}"
        )


def gpu_cell(*words, ranks=1):
    """Return a cell of the small model on ranks that share the first GPU."""
    placement = ("cluster=gpu", f"cluster.ranks_per_gpu={ranks}", f"cluster.world_size={ranks}")
    return make_cell(*placement, *SOON_OVER, *NOT_TIMED, "model=qwen3_nano", *words, machine=MACHINE)


def run_on_gpu(launcher, cell, folder, entry=None):
    """Run a cell and return its record; skip the test if a package is missing."""
    reason = refusal(cell)
    if reason is not None and "needs the package" in reason:
        pytest.skip(reason)
    return run_cell(launcher, cell, folder, entry)[0]
