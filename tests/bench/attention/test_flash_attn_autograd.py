"""Differentiable functions of the flash-attn stand-in: output, LSE and gradients against plain attention."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers.modeling_flash_attention_utils as transformers_flash

from bench.attention.flash_attn_bridge import (
    VERSION,
    flash_attn_from,
    flash_attn_func_on,
    flash_attn_varlen_func_on,
)
from bench.attention.kernels import KERNELS

QUERIES, KEYS, HEADS, KV_HEADS, HEAD_DIM = 6, 16, 4, 2, 8
ON_CPU = ("math", "torch_flash")


def plain(q, k, v, causal):
    """Output and LSE by the formula; queries are the last tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def leaves(batch, queries, keys):
    torch.manual_seed(0)
    shapes = (queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)
    return [torch.randn(batch, *shape, HEAD_DIM, dtype=torch.float64, requires_grad=True) for shape in shapes]


def with_gradients(out, lse, qkv):
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, lse, *torch.autograd.grad(out, qkv, dout)]


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(KEYS, KEYS, True), (QUERIES, KEYS, True), (QUERIES, KEYS, False)]
)
def test_flash_attn_func_matches_attention_aligned_bottom_right(kernel, batch, queries, keys, causal):
    qkv = leaves(batch, queries, keys)
    out, lse, unused = flash_attn_func_on(KERNELS[kernel])(*qkv, causal=causal, return_attn_probs=True)
    assert unused is None
    assert not lse.requires_grad
    expected = with_gradients(*plain(*qkv, causal), qkv)
    torch.testing.assert_close(with_gradients(out, lse, qkv), expected)
    torch.testing.assert_close(flash_attn_func_on(KERNELS[kernel])(*qkv, causal=causal), out)


@pytest.mark.parametrize("kernel", ON_CPU)
def test_flash_attn_varlen_func_matches_attention_per_sequence(kernel):
    qkv, ends = leaves(1, KEYS, KEYS), [0, 3, KEYS]
    offsets = torch.tensor(ends, dtype=torch.int32)
    flat = [x[0] for x in qkv]
    longest = KEYS - 3
    out = flash_attn_varlen_func_on(KERNELS[kernel])(*flat, offsets, offsets, longest, longest, causal=True)
    parts = [plain(*(x[:, start:stop] for x in qkv), True)[0][0] for start, stop in itertools.pairwise(ends)]
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(result, qkv, dout) for result in (out, expected)]
    torch.testing.assert_close(*grads)


def test_flash_attn_from_patches_imports_only_inside_its_context():
    before, modules = SimpleNamespace(**vars(transformers_flash)), set(sys.modules)
    with flash_attn_from(KERNELS["math"]):
        import flash_attn

        assert flash_attn.__version__ == VERSION
        loaded = transformers_flash._lazy_imports("flash_attention_2")
        assert loaded[:2] == (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
        # ringmaster looks for the private functions in the module of the public one.
        module = sys.modules[flash_attn.flash_attn_func.__module__]
        assert callable(module._flash_attn_forward)
        assert callable(module._flash_attn_backward)
    assert SimpleNamespace(**vars(transformers_flash)) == before
    assert set(sys.modules) == modules
