"""Limits of parity leave room for sound kernels with any number of heads."""

import pytest
import torch

from bench.attention.kernels import KERNELS, attend
from bench.measure.parity.exact import plain_attention, relative_error
from bench.measure.parity.rank import random_inputs
from bench.measure.parity.section import MAX_TOKENS, parity_limit
from tests.support.cells import make_cell

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", ["math", "torch_flash"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", [(8, 2, 16), (4, 1, 16), (8, 8, 32), (16, 2, 64), (2, 1, 64)], ids=str)
def test_a_sound_kernel_is_within_the_limits(shape, dtype, kernel):
    """With products of 16 bit in its backward, `math` exceeded the limit of dq at 8, 2, 16 in bf16."""
    names = "model.num_heads", "model.num_kv_heads", "model.head_dim"
    words = [f"{name}={number}" for name, number in zip(names, shape, strict=True)]
    inputs = random_inputs(make_cell("model=qwen3_nano", f"dtype={dtype}", *words), MAX_TOKENS, CPU)
    exact = plain_attention(tuple(x.double() for x in inputs), causal=True)
    plain = plain_attention(inputs, causal=True)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves, kernel=KERNELS[kernel], causal=True)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    errors = {name: relative_error(result, exact[name]) for name, result in results.items()}
    limits = {name: parity_limit(name, dtype, relative_error(plain[name], exact[name])) for name in results}
    assert [name for name in errors if errors[name] > limits[name]] == [], (errors, limits)
