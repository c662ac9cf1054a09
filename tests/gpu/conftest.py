"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture(scope="session")
def strangers():
    """How many processes are on the GPU that are no ranks: this one, from now on."""
    torch.zeros(1, device="cuda:0")
    return 1
