"""Whether ranks do anything: the CPU time that they and the processes they started have used.

A rank that computes, compiles or copies uses the CPU or wants to. One that waits for another rank in a
collective of gloo uses hardly any (5 to 10 ms a second, for polling), nor does one that sleeps. A rank that
waits for a GPU spins. Linux only: elsewhere no rank counts as quiet.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

QUIET_SHARE = 0.03
"""Of one core's time: a rank that uses less only polls. One of thirty threads that share a core gets more."""
BUSY_LOOKS = 0.25
"""The share of looks in which a thread of a quiet rank may have been running, or ready to run, or reading."""
LOOK_S = 1.0
"""How often to look at the most."""
LOOKS = 6
"""Within a window at least."""
PROC = Path("/proc")
STOPPED = "T"
_STATE, _SESSION, _CPU_TIMES = 0, 3, slice(11, 15)
"""Among the fields of stat that follow the program's name; the times are its own and its dead children's."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Use:
    """What one look found of a rank."""

    for_s: float
    """Since the look before."""
    cpu_s: float
    is_busy: bool
    is_stopped: bool


class Activity:
    """Follows ranks, each a session of its own, over the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looked_s: float | None = None
        self._own_s: dict[int, float] = {}
        self._family_s: dict[int, float] = {}
        self._uses: dict[int, deque[_Use]] = {}

    def look(self, now_s: float, pids: Iterable[int]) -> bool:
        """Look at these ranks, unless the last look was a moment ago; whether it did."""
        since_s = None if self._looked_s is None else now_s - self._looked_s
        if since_s is not None and since_s < min(LOOK_S, self._window_s / LOOKS):
            return False
        self._looked_s = now_s
        # A launcher that was itself suspended saw nothing in between.
        for_s = min(since_s or 0.0, 2 * LOOK_S)
        own = {pid: found for pid in pids if (found := _stat(PROC / str(pid) / "stat")) is not None}
        used = {pid: _cpu_s(found) - self._own_s.get(pid, 0.0) for pid, found in own.items()}
        idle = {pid for pid, cpu_s in used.items() if cpu_s < QUIET_SHARE * for_s}
        family = _family_cpu_s(idle) if idle else dict[int, float]()
        for pid, found in own.items():
            before_s = self._family_s.get(pid)
            by_family_s = family[pid] - before_s if pid in idle and before_s is not None else 0.0
            is_busy = pid not in idle or before_s is None or _wants_cpu(pid)
            stopped = found[_STATE] == STOPPED
            self._keep(pid, _Use(for_s, used[pid] + by_family_s, is_busy and not stopped, stopped))
        self._own_s, self._family_s = {pid: _cpu_s(found) for pid, found in own.items()}, family
        return True

    def is_quiet(self, pid: int) -> bool:
        """Whether the rank did nothing in the whole window."""
        uses = self._uses.get(pid, deque())
        long_enough_s = sum(use.for_s for use in uses)
        return (
            long_enough_s >= self._window_s
            and sum(use.cpu_s for use in uses) < QUIET_SHARE * long_enough_s
            and sum(use.is_busy for use in uses) <= BUSY_LOOKS * len(uses)
        )

    def is_stopped(self, pid: int) -> bool:
        """Whether a signal had stopped the rank in the whole window."""
        return self.is_quiet(pid) and all(use.is_stopped for use in self._uses[pid])

    def forget(self) -> None:
        """Begin the window anew."""
        self._uses = {}

    def _keep(self, pid: int, use: _Use) -> None:
        uses = self._uses.setdefault(pid, deque())
        uses.append(use)
        while sum(each.for_s for each in uses) - uses[0].for_s >= self._window_s:
            uses.popleft()


def is_stopped_now(pid: int) -> bool:
    """Whether a signal has stopped this process."""
    found = _stat(PROC / str(pid) / "stat")
    return found is not None and found[_STATE] == STOPPED


def _stat(path: Path) -> list[str] | None:
    """The fields after the program's name, which may hold anything; None of a process that is gone."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_s(stat: list[str]) -> float:
    return sum(map(int, stat[_CPU_TIMES])) / _TICKS_PER_S


def _family_cpu_s(sessions: Iterable[int]) -> dict[int, float]:
    """By session the CPU time of all its processes but the leader: compilers, say."""
    found = dict.fromkeys(sessions, 0.0)
    for folder in PROC.iterdir():
        stat = _stat(folder / "stat") if folder.name.isdecimal() else None
        leader = int(stat[_SESSION]) if stat is not None else 0
        if stat is not None and leader in found and int(folder.name) != leader:
            found[leader] += _cpu_s(stat)
    return found


def _wants_cpu(pid: int) -> bool:
    """Whether a thread of the process runs, waits for a core, or for a disk."""
    try:
        threads = [*(PROC / str(pid) / "task").iterdir()]
    except OSError:
        return False
    stats = (_stat(thread / "stat") for thread in threads)
    return any(stat is not None and stat[_STATE] in ("R", "D") for stat in stats)
