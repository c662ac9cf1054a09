"""Tokens of a call of the model, as they are kept until backward."""

import torch

from bench.extras.observe.objective import UNTRAINED
from bench.extras.observe.tokens import split_rows
from bench.extras.observe.trained_tokens import _before_backward


def test_next_tokens_around_an_image_follow_from_its_rows():
    """Positions of a token, an image of four patches in two rows, and two tokens."""
    rows = torch.tensor([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])
    ids = torch.arange(10, 17)[None]
    call = _before_backward(
        torch.zeros(1, 7, 20), {"input_ids": ids, "position_ids": rows[:, None]}, gather=None
    )
    assert torch.equal(split_rows(call.positions[0]), rows)
    known = [
        11,
        12,
        UNTRAINED,
        14,
        UNTRAINED,
        16,
        UNTRAINED,
    ]  # elsewhere another rank may hold the next token
    assert call.successors.tolist() == known
