"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def strangers():
    """How many processes are on the GPU that are no ranks: this one, once a test has used it."""
    return int(torch.cuda.is_initialized())
