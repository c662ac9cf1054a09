"""Where ranks wait for one another before a collective of the observation: none enters one alone.

An observation may end on one rank only, by an error of its own, while the training goes on. Its peers would
wait in their next collective for ever, or take a collective of the training for it. The store, unlike a
collective, lets a rank say that it will not come, and go on at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

LONGEST_PAUSE_S = 0.05
"""Between two looks at the store; the first are much shorter."""
GO_ON, STOP = "go on", "stop"


class PeerStoppedError(RuntimeError):
    """Another rank does not observe any further, so this one cannot."""


class Meetings:
    """One rank's part in the meetings of some ranks, which all hold them in the same order."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        """`name` tells these meetings from others of the same ranks; no rank waits for another here."""
        self._size = len(ranks)
        self._store = PrefixStore(f"bench.observe {name} {[*ranks]}", _get_default_store())
        self._held = 0

    def hold(self) -> None:
        """Return when all ranks are here; raise PeerStoppedError where one will not come."""
        if self._size == 1:
            return
        if self._store.add(f"{self._held} here", 1) == self._size:
            self._decide(GO_ON)
        self._await_decision()
        decision = self._store.get(self._decision)
        self._held += 1
        if decision != GO_ON.encode():
            raise PeerStoppedError("another rank stopped observing")

    def leave(self) -> None:
        """Tell the others not to wait for this rank; waits for nobody."""
        self._decide(STOP)

    @property
    def _decision(self) -> str:
        """The key of the next meeting's outcome."""
        return f"{self._held} decision"

    def _decide(self, outcome: str) -> None:
        """The first decision holds."""
        self._store.compare_set(self._decision, "", outcome)

    def _await_decision(self) -> None:
        deadline, pause_s = time.monotonic() + default_pg_timeout.total_seconds(), 1e-4
        while not self._store.check([self._decision]):
            if time.monotonic() > deadline:
                self._decide(STOP)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
