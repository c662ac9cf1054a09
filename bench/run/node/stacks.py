"""Activity of ranks, read from the stacks that they write into their logs on a signal."""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
"""Signal on which a rank writes the stacks of its threads into its log."""
STACK_S = 0.3
"""Seconds that ranks have to write their stacks before they are killed."""
POLL_S = 0.05
"""Seconds between two looks at the sizes of the logs."""
DISTRIBUTED_PATH = "torch/distributed/"
COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Files of the functions in which a rank waits for other ranks. The outermost frame in these files is the
collective that was called."""
TORCH_PATH = "/torch/"
GPU_WAIT = "synchronize"
"""Name of all torch functions in which the host waits for the work that it has queued on a GPU."""
DDP_BROADCAST = "_distributed_broadcast_coalesced"
"""Function of DDP that waits for the buffers of rank 0 inside C++."""
WAIT_CALLS: Mapping[str, re.Pattern[str]] = {
    "cpu": re.compile(r"\.(wait)\(\)"),
    "cuda": re.compile(r"\.(wait|item|tolist|cpu)\(\)"),
}
"""Calls that wait inside C++, which has no Python frame, by device. Reading a tensor waits for its GPU."""
PACKAGES_PATH = "/lib/python3"
"""Part of every path of installed packages and of the standard library."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """Python frame of a stack: file, line and function."""

    file: str
    line: int
    function: str

    @property
    def label(self) -> str:
        """Text such as `accumulate (native.py:30)`."""
        return f"{self.function} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True, slots=True)
class RankActivity:
    """State of a rank at one moment: its code or collective, and whether it is stopped or its GPU idle."""

    frame: str | None = None
    """Innermost frame outside of packages; None if the rank did not write its stack in time."""
    collective: str | None = None
    """Function in which the rank waits for other ranks; None if it does not wait."""
    is_stopped: bool = False
    """Whether a signal such as SIGSTOP has stopped the process."""
    is_idle: bool = False
    """Whether the rank's GPU has run nothing lately. A GPU that waits in a collective counts as busy."""

    @property
    def location(self) -> str:
        """Text such as `in all_reduce` or `in step (loop.py:7)`."""
        return "unresponsive" if self.frame is None else f"in {self.collective or self.frame}"


def ask_for_stacks(
    ranks: Mapping[int, tuple[int, Path]], device: str, wait_s: float
) -> dict[int, RankActivity]:
    """Signal ranks to write their stacks and return the activity of those that did so in time.

    A rank writes no stack if it is stopped, or if it has not yet installed its handler of the signal.

    Args:
        ranks: Process number and log of each rank.
        device: `cpu` or `cuda`.
        wait_s: Longest time to wait, in seconds.
    """
    starts = {rank: _size(log) for rank, (_, log) in ranks.items()}
    for pid, _ in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until_s, sizes = time.monotonic() + wait_s, starts
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        previous, sizes = sizes, {rank: _size(log) for rank, (_, log) in ranks.items()}
        if sizes == previous and all(sizes[rank] > starts[rank] for rank in ranks):
            break
    stacks = {rank: log.read_bytes()[starts[rank] :] for rank, (_, log) in ranks.items() if log.exists()}
    activities = {rank: read_activity(text.decode(errors="replace"), device) for rank, text in stacks.items()}
    return {rank: activity for rank, activity in activities.items() if activity is not None}


def read_activity(stacks: str, device: str = "cpu") -> RankActivity | None:
    """Return the activity that the stacks of a process's threads show, or None if there is no stack."""
    threads = _parse_threads(stacks)
    if not threads:
        return None
    current = threads[0]
    innermost = next((frame for frame in current if PACKAGES_PATH not in frame.file), current[0])
    collectives = (_wait_function(frames, device) for frames in threads)
    return RankActivity(frame=innermost.label, collective=next(filter(None, collectives), None))


def _wait_function(frames: Sequence[Frame], device: str) -> str | None:
    """Return the function in which a thread waits; None if it does not wait.

    It is a collective, or a call that waits for the GPU, which may be in a collective.
    """
    inside = [*takewhile(lambda frame: DISTRIBUTED_PATH in frame.file, frames)]
    called = [frame.function for frame in inside if frame.file.endswith(COLLECTIVE_FILES)]
    if called:
        return called[-1]
    innermost = frames[0]
    if innermost.function in (GPU_WAIT, DDP_BROADCAST) and TORCH_PATH in innermost.file:
        return innermost.function
    call = WAIT_CALLS[device].search(linecache.getline(innermost.file, innermost.line))
    return None if call is None else call[1]


def _parse_threads(stacks: str) -> list[list[Frame]]:
    """Return the frames of every thread, innermost first; the thread that got the signal comes first."""
    threads = list[tuple[bool, list[Frame]]]()
    for line in stacks.splitlines():
        frame = _FRAME.match(line)
        if _THREAD.match(line):
            threads.append((line.startswith("Current"), []))
        elif frame is not None and threads:
            threads[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    ordered = sorted(threads, key=lambda thread: not thread[0])
    return [frames for _, frames in ordered if frames]


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0
