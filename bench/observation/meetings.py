"""Where ranks wait for one another before a collective of the observation: none enters one alone.

An observation may end on one rank only, by an error of its own, while the training goes on. Its peers would
wait in their next collective for ever, or take a collective of the training for it. The store, unlike a
collective, lets a rank say that it will not come, and go on at once. A rank that dies says nothing: it is
waited for, but not for long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

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
    """One rank's part in the meetings of some ranks, which all hold them in the same order."""

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
