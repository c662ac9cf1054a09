"""Tokens of a call of the model, as they are kept until backward."""

import pytest
import torch

from bench.extras.observe.objective import UNTRAINED
from bench.extras.observe.tokens import split_rows
from bench.extras.observe.trained_tokens import _after_backward, _before_backward


def test_next_tokens_around_an_image_follow_from_its_rows():
    """Positions of a token, an image of four patches in two rows, and two tokens."""
    rows = torch.tensor([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])
    ids = torch.arange(10, 17)[None]
    call = _before_backward(
        torch.zeros(1, 7, 20), {"input_ids": ids, "position_ids": rows[:, None]}, gather=None
    )
    assert torch.equal(split_rows(call.positions[0]), rows)
    # Elsewhere another rank may hold the next token.
    known = [11, 12, UNTRAINED, 14, UNTRAINED, 16, UNTRAINED]
    assert call.successors.tolist() == known


@pytest.mark.parametrize(("logit", "count"), [(1.0, 5), (30.0, None)])
def test_tokens_count_by_gradient_unless_their_loss_is_zero(logit, count):
    """One of six tokens has no gradient: it does not count, or its loss is so small that it might."""
    ids = torch.arange(10, 16)[None]
    logits = torch.zeros(1, 6, 20)
    logits[0, 2, 13] = logit
    call = _before_backward(logits, {"input_ids": ids}, gather=None)
    gradient = logits[0].softmax(-1)
    gradient[range(6), range(10, 16)] -= 1
    gradient[2] = 0
    assert _after_backward(call, gradient).valid_tokens == count
