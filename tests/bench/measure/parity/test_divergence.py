"""Parity reports a tensor that lost bits although its error is within the limit."""

import pytest
import torch

from bench.measure.parity.divergence import first_divergence

EXACT = {"dq": torch.randn(1, 2, 32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize(
    ("result", "start"),
    [
        (EXACT["dq"].bfloat16().half(), "dq is fp16 but holds numbers of bf16 only"),
        (EXACT["dq"].half(), None),
        (EXACT["dq"].bfloat16(), None),
        (torch.zeros_like(EXACT["dq"]).half(), None),
    ],
    ids=["fp16 that was bf16", "fp16", "bf16", "zeros of fp16"],
)
def test_divergence_of_an_fp16_gradient_that_was_bf16(result, start):
    divergence = first_divergence(None, (), {"dq": result}, EXACT, {"dq": 1.0}, causal=True, documents=None)
    assert (divergence or "").startswith(start or "")
    assert (divergence is None) == (start is None)
