"""The ranks of somebody's own loop: what they agree on and bring together, and how they leave."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from bench.extras.observe.tokens import LoopReport


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


LONGEST_PAUSE_S = 0.05
"""Between two looks at the store; the first are much shorter."""
LONGEST_WAIT_S = 300.0
"""For a rank that is late: another may write a checkpoint, or compute an exact result."""
GO_ON, STOP = "go on", "stop"


class PeerStoppedError(RuntimeError):
    """Another rank does not observe any further, so this one cannot."""


class PeerMissingError(RuntimeError):
    """Another rank did not come in time: it is dead, busy with something else, or does not observe."""


class Meetings:
    """One rank's part in the meetings of some ranks before each collective of the observation.

    An observation may end on one rank only, by an error of its own, while the training goes on. Its peers
    would wait in their next collective for ever, or take a collective of the training for it. The store,
    unlike a collective, lets a rank say that it will not come, and go on at once. A rank that dies says
    nothing: it is waited for, but not for long. All ranks hold their meetings in the same order.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        """`name` tells these meetings from others of the same ranks; no rank waits for another here."""
        self._size = len(ranks)
        self._store = PrefixStore(f"bench.observe {name} {[*ranks]}", _get_default_store())
        self._longest_s = longest_wait_s()
        self._held = 0

    def hold(self) -> None:
        """Return when all ranks are here.

        Raises PeerStoppedError where one will not come, PeerMissingError where one did not come in time.
        """
        if self._size == 1:
            return
        if self._store.add(self._key("here"), 1) == self._size:
            self._decide(GO_ON)
        self._await_decision()
        decision = self._store.get(self._key("decision"))
        self._held += 1
        if decision != GO_ON.encode():
            raise PeerStoppedError("another rank stopped observing")

    def leave(self) -> None:
        """Tell the others not to wait for this rank; waits for nobody."""
        self._decide(STOP)

    def _await_decision(self) -> None:
        deadline, pause_s = time.monotonic() + self._longest_s, 1e-4
        while not self._store.check([self._key("decision")]):
            if time.monotonic() > deadline:
                self._decide(STOP)
                raise PeerMissingError(
                    f"{self._store.add(self._key('here'), 0)} of {self._size} ranks came to this point within"
                    f" {self._longest_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _key(self, what: str) -> str:
        """Of the next meeting: how many are `here`, or its `decision`."""
        return f"{self._held} {what}"

    def _decide(self, outcome: str) -> None:
        """The first decision holds."""
        self._store.compare_set(self._key("decision"), "", outcome)


def longest_wait_s() -> float:
    """At most half of what a collective of the training waits: it may be one of those that wait for us."""
    group = _get_default_group()
    waits = [group._get_backend(device).options._timeout for device in group._device_types]
    return min(LONGEST_WAIT_S, *(each.total_seconds() / 2 for each in waits))
