"""Group, device, signals and an abortable barrier for the ranks of a user's own loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from bench.config import ConfigError

LONGEST_PAUSE_S = 0.05
"""Longest pause between two polls of the store; the first pauses are much shorter."""
LONGEST_WAIT_S = 300.0
"""Longest wait for a late rank, which may be writing a checkpoint or computing an exact result."""
GO_ON, STOP = "go on", "stop"


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of ranks that share a sequence; None if every rank has its own sequences."""
    is_mesh = isinstance(group, DeviceMesh) and group.ndim == 1
    if group is not None and not is_mesh and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"bench.observe: group={group!r}: must be a process group or a one-dimensional device mesh of the"
            " ranks that share a sequence, or None"
        )
    ranks = group.get_group() if isinstance(group, DeviceMesh) else group
    return None if ranks is None or dist.get_world_size(ranks) == 1 else ranks


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters, or the current GPU if they are offloaded to host memory."""
    parameter_device = next(model.parameters()).device
    if parameter_device.type != "cuda" and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return parameter_device


@contextmanager
def delay_sigterm() -> Iterator[None]:
    """Delay SIGTERM until the context ends. When a rank fails, torchrun sends it, and SIGKILL 30 s later."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads receive no signals
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        if received:
            signal.raise_signal(signal.SIGTERM)


class PeerStoppedError(RuntimeError):
    """Another rank has stopped observing, so this rank cannot go on observing either."""


class AbortableBarrier:
    """A barrier that any rank can abort; the ranks wait at it before every collective of the observation.

    Without it, an error on one rank would leave the others waiting in a collective. A rank that dies aborts
    nothing, so the wait has a time limit: half the timeout of the training's collectives, as the missing rank
    may wait for this one in such a collective.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        """Create the barrier without waiting; `name` distinguishes barriers of the same ranks."""
        self._ranks = ranks
        self._store = PrefixStore(f"bench.observe {name} {[*ranks]}", _get_default_store())
        self._longest_s = min(LONGEST_WAIT_S, collective_timeout_s() / 2)
        self._rounds = 0

    def wait(self) -> None:
        """Return when all ranks have arrived; raise PeerStoppedError or TimeoutError if one will not."""
        if self._store.add(f"{self._rounds} arrivals", 1) == len(self._ranks):
            self._decide(GO_ON)
        deadline, pause_s = time.monotonic() + self._longest_s, 1e-4
        while not self._store.check([f"{self._rounds} decision"]):
            if time.monotonic() > deadline:
                self._decide(STOP)
                arrivals = self._store.add(f"{self._rounds} arrivals", 0)
                raise TimeoutError(
                    f"only {arrivals} of {len(self._ranks)} ranks reached this point of bench.observe within"
                    f" {self._longest_s:g} s; every rank must enter the context in every step"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if self._store.get(f"{self._rounds} decision").decode() != GO_ON:
            raise PeerStoppedError("another rank stopped observing")
        self._rounds += 1

    def abort(self) -> None:
        """Make `wait` raise on the other ranks."""
        self._decide(STOP)

    def announce_end(self) -> None:
        self._store.set(f"end of {dist.get_rank()}", "")

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not announced their end: they were killed, or are still computing."""
        return [rank for rank in self._ranks if not self._store.check([f"end of {rank}"])]

    def _decide(self, decision: str) -> None:
        """Set the decision of this round unless another rank has set it."""
        self._store.compare_set(f"{self._rounds} decision", "", decision)


def collective_timeout_s() -> float:
    """Return the shortest timeout of a collective of the default process group."""
    group = _get_default_group()
    backends = (group._get_backend(device) for device in group._device_types)
    return min(float(backend.options._timeout.total_seconds()) for backend in backends)
