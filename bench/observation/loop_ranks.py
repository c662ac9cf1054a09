"""The ranks of somebody's own loop: what they agree on and bring together, and how they leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench.observation.tokens import LoopReport


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks as a group; None where a rank shares its sequences with nobody."""
    found = group.get_group() if isinstance(group, DeviceMesh) else group
    return None if found is None or dist.get_world_size(found) == 1 else found


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: where its parameters are, unless those wait in host memory for a GPU.

    A loop that never says which GPU is current leaves the first one current on every rank.
    """
    kept = next(model.parameters()).device
    if kept.type != "cuda" and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return kept


def agreed_time(device: torch.device) -> datetime:
    """Rank 0's clock: what makes records of the same loop known as such."""
    now = torch.tensor(datetime.now(UTC).timestamp(), dtype=torch.float64, device=device)
    dist.broadcast(now, src=0)
    return datetime.fromtimestamp(now.item(), UTC)


def gathered_on_rank_0(report: LoopReport) -> Sequence[LoopReport]:
    """The reports of all ranks, in their order, on rank 0; none elsewhere. All must call it."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(report, gathered)
    return gathered or []


@contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Let SIGTERM wait until the context is left. torchrun sends it at once, and SIGKILL 30 s later.

    Only the main thread can hear signals; elsewhere nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if heard:
            signal.raise_signal(signal.SIGTERM)
