"""What ranks are doing at this moment, by the stacks that they write into their logs when asked."""

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
"""On it a rank writes its stack into its log."""
STACK_S = 0.3
"""How long a rank has to write its stack before it is killed."""
POLL_S = 0.05
DISTRIBUTED = "torch/distributed/"
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Code that a rank is in while it waits for the others; its outermost function is the one that was called."""
TORCH = "/torch/"
WAITS_FOR_A_GPU = "synchronize"
"""torch's name for each function by which the host waits for what it has queued on a GPU."""
WAITS: Mapping[str, re.Pattern[str]] = {
    "cpu": re.compile(r"\.(wait)\(\)"),
    "cuda": re.compile(r"\.(wait|item|tolist|cpu)\(\)"),
}
"""By device, calls that C++ answers, so that no frame tells of them; reading a tensor waits for its GPU."""
PACKAGES = "/lib/python3"
"""In the path of code that is Python's own or was installed."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in the code."""

    file: str
    line: int
    function: str

    @property
    def label(self) -> str:
        """`accumulate (native.py:30)`."""
        return f"{self.function} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank is in."""

    where: str | None = None
    """Its innermost code outside of packages; None where it did not write its stack in time."""
    collective: str | None = None
    """What it waits in for other ranks; None where it does not."""
    is_stopped: bool = False
    """By a signal."""
    is_idle: bool = False
    """Its GPU ran nothing of late: one that waits for others in a collective keeps its own busy."""

    @property
    def whereabouts(self) -> str:
        """A collective, else its own code."""
        return "without an answer" if self.where is None else f"in {self.collective or self.where}"


def ask_for_stacks(ranks: Mapping[int, tuple[int, Path]], device: str, wait_s: float) -> dict[int, Doing]:
    """What ranks are doing, by the process and the log of each; without those that did not answer in time.

    A rank that is stopped, or that never came to say that it can be asked, does not answer.
    """
    starts = {rank: _size(log) for rank, (_, log) in ranks.items()}
    for pid, _ in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until_s, sizes = time.monotonic() + wait_s, starts
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        before, sizes = sizes, {rank: _size(log) for rank, (_, log) in ranks.items()}
        if sizes == before and all(sizes[rank] > starts[rank] for rank in ranks):
            break
    stacks = {rank: log.read_bytes()[starts[rank] :] for rank, (_, log) in ranks.items() if log.exists()}
    found = {rank: doing(each.decode(errors="replace"), device) for rank, each in stacks.items()}
    return {rank: each for rank, each in found.items() if each is not None}


def doing(stacks: str, device: str = "cpu") -> Doing | None:
    """What a process on this device does by the stacks of its threads; None where there is none."""
    threads = _threads(stacks)
    if not threads:
        return None
    current = threads[0]
    own = next((frame for frame in current if PACKAGES not in frame.file), current[0])
    return Doing(
        where=own.label,
        collective=next(filter(None, (_collective(each, device) for each in threads)), None),
    )


def _collective(frames: Sequence[Frame], device: str) -> str | None:
    """What a thread waits in: a collective, or its GPU, which other ranks keep waiting in one."""
    inside = [*takewhile(lambda frame: DISTRIBUTED in frame.file, frames)]
    called = [frame.function for frame in inside if frame.file.endswith(COLLECTIVES)]
    if called:
        return called[-1]
    innermost = frames[0]
    if innermost.function == WAITS_FOR_A_GPU and TORCH in innermost.file:
        return WAITS_FOR_A_GPU
    read = WAITS[device].search(linecache.getline(innermost.file, innermost.line))
    return None if read is None else read[1]


def _threads(stacks: str) -> list[list[Frame]]:
    """The frames of each thread, innermost first, of the thread that was asked first."""
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
