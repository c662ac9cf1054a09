"""Which device a loop is on, and what of it is left for a check."""

import math
from types import SimpleNamespace

import pytest
import torch

from bench.extras.observe import loop_ranks, parity
from bench.extras.observe.attention import Captured
from bench.extras.observe.loop_ranks import device_of


def model_on(device):
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))


@pytest.mark.parametrize(("kept", "device"), [("cuda:3", "cuda:3"), ("cpu", "cuda:0")])
def test_parameters_say_which_gpu_a_loop_is_on_that_never_set_one(monkeypatch, kept, device):
    monkeypatch.setattr(loop_ranks.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of(model_on(kept)) == torch.device(device)


def test_heads_are_not_compared_on_a_gpu_that_has_no_room_for_them(monkeypatch):
    """In float64 a block of scores alone is as large as a rank's activations."""
    free, held = {"cuda:3": 2**29}, {"cuda:3": 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 2**36))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held[str(device)])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[str(device)] // 2)
    on_gpu = SimpleNamespace(device=torch.device("cuda:3"))
    assert parity._free_bytes(Captured({"q": on_gpu})) == 2**30
    assert parity._free_bytes(Captured({"q": torch.ones(1)})) == math.inf
    x = {name: torch.empty(1, 4, 2**16, 64, device="meta") for name in ("q", "out", "dout")}
    x |= {name: torch.empty(1, 1, 2**16, 64, device="meta") for name in ("k", "v")}
    shards = SimpleNamespace(tokens=2**16)
    found = parity._compare_heads(x, None, shards, None, 2.0**30)
    assert found.errors == {}
    assert "at 65,536 tokens needs 13.5 GiB, and 1.0 GiB of the GPU are free" in found.reason
