"""What each phase of a step takes beyond what was there when it began, and what it leaves there."""

from __future__ import annotations

from collections import Counter


class PhaseBytes:
    """Bytes by phase; of a phase that comes several times the most."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        """Its peak, less what was there at its start."""
        self.kept: Counter[str] = Counter()
        """What was there at its end, less what was there at its start."""
        self._start_bytes = 0

    def end(self, name: str | None, peak_bytes: int, live_bytes: int) -> None:
        """A phase ends, and another begins with what is live; None is what lies between phases."""
        if name is not None:
            self.taken[name] = max(self.taken[name], peak_bytes - self._start_bytes)
            self.kept[name] = max(self.kept[name], live_bytes - self._start_bytes)
        self._start_bytes = live_bytes
