"""What a rank is doing and has done: its pass, the phase of the step, and seconds per phase.

It tells before steps, never between them. Timed steps run back to back: on a GPU a step is launched long
before it is done, so that only waiting for it, which would change what is timed, could tell that it is.
The listener counts steps by the clock and says "about".
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

JOIN = "join"
"""The phase in which ranks connect and make the first collective, before any model is built."""


class WrongResultError(RuntimeError):
    """Raised on every rank when a check made before timing fails; its text names the first divergence."""


class RefusedError(RuntimeError):
    """Raised on every rank that cannot do what the cell asks for, before any step; its text says why."""


class RankStage(msgspec.Struct, frozen=True, tag=True):
    """What a rank has begun."""

    pass_name: str
    """The pass, or what a rank does before and after its passes: join, strategy, limit, build, finish."""
    part: str | None = None
    """Something within it."""
    steps: int = 0
    """Full-length steps that it is about to run; 0 where it runs none."""
    step_s: float | None = None
    """Seconds that a full-length step took; None where none has been timed yet."""


class StepPhase:
    """The phase of a step that runs now: load, forward, loss, backward or optimizer.

    `load` is building the model and fetching a batch; `optimizer` is clipping, updating and clearing.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """The phase; None outside of any."""
        self.on_change: Callable[[str | None], None] | None = None
        """Called with the phase that ends, before another begins; it must not fail."""
        self.notes: list[Callable[[str | None], None]] = []
        """Each is called with the phase that begins; it must not fail."""

    def enter(self, name: str | None) -> None:
        """One phase ends and the next begins; costs an attribute."""
        if self.on_change is not None:
            self.on_change(self.name)
        self.name = name
        for note in self.notes:
            note(name)


@dataclass(slots=True)
class RankLog:
    """What a rank does, how many seconds each phase of its life took, and who is told."""

    tell: Callable[[RankStage], None]
    """Called with what the rank begins."""
    phase: str = "start"
    """The pass that runs now, or join, strategy, limit, build or finish."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase that is over."""
    step: StepPhase = field(default_factory=StepPhase)
    """Where in a step the rank is."""
    on_error: Callable[[BaseException], None] = lambda _: None
    """Called with an error where it leaves a phase, before any cleanup further out: that may take long, or
    fail in a way of its own and hide the cause."""
    limit_base_bytes: int | None = None
    """What a memory limit counts from; None without one."""

    def keep(self, note: Callable[[str, str | None], None]) -> None:
        """Have every phase noted, and the step's phase with it, from the present ones on."""
        self.step.notes.append(lambda step_phase: note(self.phase, step_phase))
        note(self.phase, self.step.name)

    def begin(self, part: str) -> None:
        """Tell of something within the phase that may take long and runs no steps."""
        self.step.enter(self.step.name)
        self.tell(RankStage(self.phase, part))

    @contextmanager
    def during(self, phase: str, steps: int = 0, step_s: float | None = None) -> Iterator[None]:
        """Name the phase for messages; a phase that raises stays the current one.

        `steps` it is about to run at full length, of `step_s` seconds each: the listener counts by that.
        """
        self.phase = phase
        self.step.enter(None)
        self.tell(RankStage(phase, steps=steps, step_s=step_s))
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.on_error(error)
            raise
        self.phases_s[phase] = time.monotonic() - start


PLACE_BYTES = 128


@dataclass(frozen=True, slots=True)
class RankState:
    """The phase of a rank's life and of its step."""

    phase: str
    step_phase: str | None
    count: int = 0
    """How many places it has noted, this one among them."""


class RankStateFile:
    """A rank's own note of its place: memory that it shares with a file, so that noting is no system call."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no room for the file."""
        # Written before it is mapped: a page of a full disk would end the process when it is first touched.
        path.write_bytes(b" " * PLACE_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), PLACE_BYTES)
        self._count = 0

    def note(self, phase: str, step_phase: str | None) -> None:
        """Keep this place, until the next one."""
        self._count += 1
        place = f"{self._count} {phase} {step_phase or ''}"
        self._map[:] = place.encode()[:PLACE_BYTES].ljust(PLACE_BYTES)


def read_place(path: Path) -> RankState | None:
    """The place that a rank noted last; None where it never did."""
    try:
        count, *words = path.read_bytes().decode(errors="replace").split()
    except (OSError, ValueError):
        return None
    return RankState(words[0], words[1] if len(words) > 1 else None, int(count))


def place_path(folder: Path, rank: int) -> Path:
    """Where a rank's place is kept in a cell's temporary folder."""
    return folder / f"rank_{rank}.place"
