"""The device of an observed loop, and the GPU memory that is free for its check."""

import math
from types import SimpleNamespace

import pytest
import torch

from bench.extras.observe import loop_ranks, parity
from bench.extras.observe.attention import CapturedAttention
from bench.extras.observe.loop_ranks import device_of


def model_on(device):
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device))]))


@pytest.mark.parametrize(("parameters", "device"), [("cuda:3", "cuda:3"), ("cpu", "cuda:0")])
def test_device_of_is_that_of_parameters_if_no_gpu_was_set(monkeypatch, parameters, device):
    monkeypatch.setattr(loop_ranks.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of(model_on(parameters)) == torch.device(device)


def test_parity_compares_no_heads_without_free_gpu_memory(monkeypatch):
    """A block of float64 scores alone is as large as a rank's activations."""
    free, reserved = {"cuda:3": 2**29}, {"cuda:3": 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[str(device)], 2**36))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[str(device)])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: reserved[str(device)] // 2)
    on_gpu = SimpleNamespace(device=torch.device("cuda:3"))
    assert parity._free_bytes(CapturedAttention({"q": on_gpu})) == 2**30
    assert parity._free_bytes(CapturedAttention({"q": torch.ones(1)})) == math.inf
    x = {name: torch.empty(1, 4, 2**16, 64, device="meta") for name in ("q", "out", "dout")}
    x |= {name: torch.empty(1, 1, 2**16, 64, device="meta") for name in ("k", "v")}
    shards = SimpleNamespace(tokens=2**16)
    section = parity._compare_heads(x, None, shards, None, 2.0**30, is_first_rank=True)
    assert section.errors == {}
    for part in ("65,536 tokens", "needs 13.5 GiB", "1.0 GiB free"):
        assert part in section.reason
