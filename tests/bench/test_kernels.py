"""Each kernel's output, LSE and gradients are those of plain float64 attention."""

import pytest
import torch

from bench.attention.kernels import KERNELS, attend, kernel_backward, kernel_forward

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
AVAILABLE = sorted(name for name, kernel in KERNELS.items() if kernel.available())


def plain_attention(q, k, v, causal):
    """Output and LSE in float64 of the inputs as they are, differentiable."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def relative_error(found, expected):
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", AVAILABLE)
def test_output_lse_and_gradients_match_float64(name, heads, dtype, causal):
    kernel, (num_heads, num_kv_heads), scale = KERNELS[name], HEADS[heads], 16**-0.5
    torch.manual_seed(0)
    q, dout = (torch.randn(2, num_heads, 96, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, num_kv_heads, 96, 16).to(dtype) for _ in range(2))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain_attention(*wide, causal)
    out.backward(dout.double())
    found_out, found_lse = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
    found = kernel_backward(kernel, dout, q, k, v, found_out, found_lse, causal=causal, scale=scale)
    assert relative_error(found_out, out) < LIMITS[dtype]
    assert relative_error(found_lse, lse) < LIMITS[dtype]
    for grad, x in zip(found, wide, strict=True):
        assert relative_error(grad, x.grad) < LIMITS[dtype]


@pytest.mark.parametrize("name", AVAILABLE)
def test_large_logits_give_no_nan(name):
    q, k, v = (100 * torch.randn(1, 2, 64, 16) for _ in range(3))
    q.requires_grad_()
    out = attend(q, k, v, kernel=KERNELS[name], causal=True)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
