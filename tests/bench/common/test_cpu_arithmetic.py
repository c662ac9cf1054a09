"""CPU ranks without 16-bit instructions compute in float32, round once, and have the estimated copies."""

import os
import subprocess
import sys

import pytest
import torch

from bench.attention.kernels import KERNELS, torch_flash
from bench.common.cpu_arithmetic import cpu_arithmetic, estimated_bf16_instructions
from bench.cost.memory import wide_copies_bytes
from bench.measure.memory.trackers import AllocationTracker
from bench.ranks import products
from bench.ranks.products import BLOCK_NUMBERS, use_wide_products
from tests.support.cells import tiny_cell

ASK = """
import torch
from bench.common.cpu_arithmetic import cpu_arithmetic, estimated_bf16_instructions
from bench.ranks.products import use_wide_products

print(estimated_bf16_instructions(), cpu_arithmetic(torch.bfloat16), use_wide_products() is not None)
"""
"""Program that prints the arithmetic of a fresh process, as torch reads its variable only once."""


def test_products_run_in_float32_with_avx2():
    variables = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "torch.float32", "True"]


def test_estimated_bf16_instructions_match_torch():
    assert estimated_bf16_instructions() == (cpu_arithmetic(torch.bfloat16) == torch.bfloat16)


@pytest.fixture
def wide(monkeypatch):
    """Products as on a CPU without 16-bit instructions, on any CPU."""
    for module in (products, torch_flash):
        monkeypatch.setattr(
            module, "cpu_arithmetic", lambda dtype: torch.float32 if dtype.itemsize == 2 else dtype
        )


@pytest.fixture
def wide_products(wide):
    library = use_wide_products()
    yield
    del library


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


ROUNDED_ONCE = 2**-8
BLOCK = BLOCK_NUMBERS // 9
SHAPES = [(3, 5, 7), (BLOCK + 3, 8, 9), (8, 2 * BLOCK + 1, 9), (8, 9, BLOCK + 5), (0, 4, 3), (4, 0, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
@pytest.mark.usefixtures("wide_products")
def test_products_are_those_of_float64_rounded_once(dtype, rows, inner, columns):
    a, b, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inner), (columns, inner), (columns,)))
    exact = a.double() @ b.double().t()
    assert torch.mm(a, b.t()).shape == exact.shape
    if 0 not in (rows, inner):
        assert error(torch.mm(a, b.t()), exact) < ROUNDED_ONCE
    found = torch.addmm(bias, a, b.t(), beta=0.5, alpha=2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), 0.5 * bias + 2 * exact, rtol=2 * ROUNDED_ONCE, atol=0.05)


def test_releasing_wide_products_restores_torchs_operators():
    a = torch.randn(64, 4096).bfloat16()
    own = a @ a.t()
    library = use_wide_products()
    del library
    assert torch.equal(a @ a.t(), own)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("threads", [1, 2])
def test_wide_copies_bytes_match_the_allocation_tracker(threads, monkeypatch):
    monkeypatch.setattr("bench.cost.memory.estimated_bf16_instructions", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cell = tiny_cell("strategy=local", "seq_len=2k", "dtype=bf16", f"cluster.threads_per_rank={threads}")
    model = cell.model
    q, k, v, dout = (torch.randn(1, model.num_heads, 2048, model.head_dim).bfloat16() for _ in range(4))
    kernel = KERNELS["torch_flash"]
    with AllocationTracker() as tracker:
        out, lse = kernel.forward(q, k, v, True, 0.25)
    assert tracker.peak_bytes > 3 * 4 * threads * 2048 * model.head_dim  # Q, K and V in float32
    with AllocationTracker() as tracker:
        before = tracker.peak_bytes
        kernel.backward(dout, q, k, v, out, lse, True, 0.25)
    gradients = 3 * q.nbytes
    assert tracker.peak_bytes - before - gradients == pytest.approx(wide_copies_bytes(cell), rel=0.05)
