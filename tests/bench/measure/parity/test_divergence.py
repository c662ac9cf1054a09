"""What parity names although every error is within its limit."""

import pytest
import torch

from bench.measure.parity.divergence import first_divergence

EXACT = {"dq": torch.randn(1, 2, 32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (EXACT["dq"].bfloat16().half(), "dq is fp16 but holds numbers of bf16 only"),
        (EXACT["dq"].half(), None),
        (EXACT["dq"].bfloat16(), None),
        (torch.zeros_like(EXACT["dq"]).half(), None),
    ],
    ids=["fp16 that was bf16", "fp16", "bf16", "zeros of fp16"],
)
def test_a_gradient_that_went_through_bf16_is_named(found, said):
    divergence = first_divergence(None, (), {"dq": found}, EXACT, {"dq": 1.0}, causal=True, documents=None)
    assert (divergence or "").startswith(said or "")
    assert (divergence is None) == (said is None)
