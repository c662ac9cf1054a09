"""Fixtures of the tests on a GPU."""

import pytest
import torch


@pytest.fixture(scope="session")
def strangers():
    """Return the number of processes on the GPU that are not ranks: one, because this process uses it too."""
    torch.zeros(1, device="cuda:0")
    return 1
