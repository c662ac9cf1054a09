"""The device of an observed loop."""

from types import SimpleNamespace

import pytest
import torch

from bench.extras.observe import loop_ranks
from bench.extras.observe.loop_ranks import device_of


@pytest.mark.parametrize(("parameters", "device"), [("cuda:3", "cuda:3"), ("cpu", "cuda:0")])
def test_device_of_is_that_of_parameters_if_no_gpu_was_set(monkeypatch, parameters, device):
    monkeypatch.setattr(loop_ranks.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    parameter = SimpleNamespace(device=torch.device(parameters))
    assert device_of(SimpleNamespace(parameters=lambda: iter([parameter]))) == torch.device(device)
