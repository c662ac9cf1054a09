"""Progress of a rank: the phase of its life, the phase of its step, and the seconds of each phase.

A rank reports before steps, never between them. Timed steps run back to back, and the host launches a GPU's
step long before it ends. Waiting for the end of a step, only to report it, would change the measured times.
The launcher therefore estimates the number of finished steps from the clock and writes "about".
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
"""Phase in which ranks connect and make the first collective, before the model is built."""


class WrongResultError(RuntimeError):
    """Failure of a check before the timed steps, raised on every rank; the message names the divergence."""


class RefusedError(RuntimeError):
    """Request that the ranks cannot carry out, raised before the first step; the message says why."""


class RankStage(msgspec.Struct, frozen=True, tag=True):
    """Report of a rank that it has begun a phase."""

    pass_name: str
    """Name of a pass, or of a phase before or after the passes: join, strategy, limit, build, finish."""
    part: str | None = None
    """Part of the phase, for example `tokenizing`; None for the whole phase."""
    steps: int = 0
    """Number of full-length steps that the rank is about to run."""
    step_s: float | None = None
    """Seconds of an earlier full-length step; None before the first timed step."""


class StepPhase:
    """Phase of the current step: load, forward, loss, backward or optimizer.

    `load` is building the model or fetching a batch. `optimizer` is clipping gradients, updating parameters
    and clearing gradients.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Current phase; None outside of a step."""
        self.on_change: Callable[[str | None], None] | None = None
        """Function that is called with the phase that ends, before the next begins. It must not raise."""
        self.listeners: list[Callable[[str | None], None]] = []
        """Functions that are called with the phase that begins. They must not raise."""

    def enter(self, name: str | None) -> None:
        """End the current phase and begin the next. This only sets an attribute if nothing listens."""
        if self.on_change is not None:
            self.on_change(self.name)
        self.name = name
        for listener in self.listeners:
            listener(name)


@dataclass(slots=True)
class RankLog:
    """Current phase of a rank, seconds of its finished phases, and listeners."""

    report: Callable[[RankStage], None]
    """Function that reports the beginning of a phase, or of a part of one, to the launcher."""
    phase: str = "start"
    """Pass that runs now, or start, join, strategy, limit, build or finish."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each finished phase."""
    step: StepPhase = field(default_factory=StepPhase)
    """Phase of the current step."""
    on_error: Callable[[BaseException], None] = lambda _: None
    """Function that is called with an error that leaves a phase, before outer cleanup runs. Cleanup may take
    long, or raise another error that hides the cause."""
    limit_base_bytes: int | None = None
    """Bytes of the process that a memory limit does not count; None without a limit."""

    def add_listener(self, listener: Callable[[str, str | None], None]) -> None:
        """Call `listener` with the current phases of the rank and of its step, now and at every change."""
        self.step.listeners.append(lambda step_phase: listener(self.phase, step_phase))
        listener(self.phase, self.step.name)

    def begin_part(self, part: str) -> None:
        """Report a part of the phase that may take long and runs no steps."""
        self.step.enter(self.step.name)
        self.report(RankStage(self.phase, part))

    @contextmanager
    def run_phase(self, phase: str, steps: int = 0, step_s: float | None = None) -> Iterator[None]:
        """Run a phase: report it, and store its seconds at the end.

        A phase that raises an error stays the current one, so that messages name it.

        Args:
            phase: Name of the phase.
            steps: Number of full-length steps that it runs.
            step_s: Expected seconds of a step, from which the launcher estimates progress.
        """
        self.phase = phase
        self.step.enter(None)
        self.report(RankStage(phase, steps=steps, step_s=step_s))
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.on_error(error)
            raise
        self.phases_s[phase] = time.monotonic() - start


STATE_BYTES = 128
"""Size of the file with a rank's state."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Phase of a rank, and phase of its step."""

    phase: str
    step_phase: str | None
    count: int = 0
    """Number of states that the rank has written, including this one. An unchanged count means no
    progress."""


class RankStateFile:
    """File with the current state of a rank, mapped into memory so that writing needs no system call."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: If the disk has no room for it.
        """
        # Write before mapping: the first write to a mapped page of a full disk would kill the process.
        path.write_bytes(b" " * STATE_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), STATE_BYTES)
        self._count = 0

    def write(self, phase: str, step_phase: str | None) -> None:
        self._count += 1
        state = f"{self._count} {phase} {step_phase or ''}"
        self._map[:] = state.encode()[:STATE_BYTES].ljust(STATE_BYTES)


def read_rank_state(path: Path) -> RankState | None:
    """Return the last state that a rank wrote; None if it wrote none."""
    try:
        count, *words = path.read_bytes().decode(errors="replace").split()
    except (OSError, ValueError):
        return None
    return RankState(words[0], words[1] if len(words) > 1 else None, int(count))


def rank_state_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's state file in the temporary folder of a cell."""
    return folder / f"rank_{rank}.place"
