"""Labels and weights of losses that are derived from the gradient of the logits."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.extras.observe.objective import SIXTEEN_BIT_LIMIT, UNTRAINED
from bench.extras.observe.trained_tokens import _gradient_reader, _why_unreadable

TOKENS, VOCABULARY = 200, 50
IDS = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
LABELS = torch.cat([IDS[0, 1:], torch.tensor([3])])


def step(loss_of, dtype=torch.float32, scale=0.3, logits=None):
    """Return what is derived from the gradient of `loss_of(logits)`."""
    random = torch.randn(1, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)) * scale
    logits = (random if logits is None else logits).to(dtype).requires_grad_()
    read = _gradient_reader(logits.detach(), {"input_ids": IDS}, torch.arange(TOKENS)[None])
    (gradient,) = torch.autograd.grad(loss_of(logits[0]), logits)
    return read(gradient[0])


def focal(logits):
    losses = cross_entropy(logits, LABELS, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


LOSSES = {
    "mean": (lambda logits: cross_entropy(logits, LABELS), True, True),
    "sum of half of the tokens": (lambda logits: cross_entropy(logits[:100], LABELS[:100]) * 100, True, True),
    "focal": (focal, True, False),
    "label smoothing": (lambda logits: cross_entropy(logits, LABELS, label_smoothing=0.05), False, None),
    "temperature": (lambda logits: cross_entropy(logits / 1.1, LABELS), False, None),
    "square of the normaliser": (
        lambda logits: cross_entropy(logits, LABELS) + 0.01 * logits.logsumexp(-1).square().mean(),
        False, None,
    ),
    "two targets that are not next": (
        lambda logits: sum(cross_entropy(logits[:-1], (LABELS[:-1] + n) % VOCABULARY) for n in (1, 2)),
        False, None,
    ),
}  # fmt: skip
"""Loss, whether its gradient is a weight times softmax minus one-hot, and whether all weights are equal."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_of_the_logits_shows_the_form_of_the_loss(loss, dtype):
    loss_of, is_plain, is_even = LOSSES[loss]
    result = step(loss_of, dtype)
    is_error_small = not result.softmax_error > SIXTEEN_BIT_LIMIT  # nan if no label is the next token
    assert is_error_small is is_plain
    if is_plain:
        weights = result.weights[~np.isnan(result.weights)]
        assert bool(weights.std() <= SIXTEEN_BIT_LIMIT / 4 * weights.mean()) is is_even


def test_weights_labels_and_loss_are_those_of_the_mean():
    ignored = LABELS.where(torch.arange(TOKENS) >= 80, -100)
    result = step(lambda logits: cross_entropy(logits, ignored))
    assert result.weights[0, 80:] == pytest.approx(1 / 120, rel=1e-4)
    assert result.labels[0].tolist() == [UNTRAINED] * 80 + LABELS[80:].tolist()
    assert result.valid_tokens is None


def test_even_logits_do_not_show_the_form():
    result = step(lambda logits: cross_entropy(logits / 2, LABELS), logits=torch.zeros(1, TOKENS, VOCABULARY))
    assert result.softmax_error == math.inf


@pytest.mark.parametrize("length", [TOKENS // 2, 2 * TOKENS])
def test_logits_of_other_tokens_are_not_read(length):
    reason = _why_unreadable(torch.zeros(1, length, VOCABULARY), IDS.shape, VOCABULARY)
    assert reason == f"the model returned logits of {length} tokens and was given {TOKENS}"
