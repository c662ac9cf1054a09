"""The passes of one rank, run over the steps of whatever is measured.

Passes ask for steps by yielding; who has the steps, a workload of ours or somebody's own training loop, runs
them. So the same passes measure both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import to_builtins

from bench.attention.watch import AttentionWatch
from bench.config import MeasureConfig
from bench.measure import PASSES, rank_code
from bench.measure.subject import Subject
from bench.measure.tap import CommunicationTap
from bench.ranks.log import RankLog


class StepRequest(Enum):
    """What a pass asks for."""

    BETWEEN = auto()
    """To be resumed when the next step is about to begin: what is switched on after it sees only the step."""
    FIRST = auto()
    """The cheapest step that pays for all that happens only once."""
    STEP = auto()
    """One step at full length; what it returns is sent back."""


Steps = Generator[StepRequest, Any, None]
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """What the clock showed of one rank's steps."""

    step_times_ms: list[float]
    window_ms: float
    warmup: str
    outcomes: list[Any]
    """What all full-length steps returned, the timed ones last."""


class RankPass:
    """One pass on one rank. A pass overrides only the methods that it needs."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement

    def around_building(self) -> AbstractContextManager[Any]:
        """Around the building of what is measured."""
        return nullcontext()

    def around_first_step(self) -> AbstractContextManager[Any]:
        """Around the first step, which pays for all that happens only once."""
        return nullcontext()

    def around_window(self) -> AbstractContextManager[Any]:
        """Around each window under the clock: nothing of it may run between the steps."""
        return nullcontext()

    def around_inspected_step(self) -> AbstractContextManager[Any]:
        """Around the one step that is looked at from inside and not timed."""
        return nullcontext()

    def before_steps(self) -> None:
        """What has to be done before any step changes the parameters; every rank runs it."""

    def run(self) -> Steps:
        """The pass's own turn: it yields wherever it needs a step; every rank runs it."""
        yield from ()

    def agreed(self, count: int) -> int:
        """Rank 0's count, for all; every rank must call it."""
        decision = torch.tensor(count, device=self.measurement.subject.device)
        self.measurement.meet()
        dist.broadcast(decision, src=0)
        return int(decision.item())

    def part(self) -> Any:
        """This rank's part of the section, after all steps; None where there is none. Every rank calls it."""
        return None


class Measurement:
    """What is measured on one rank, and what the passes share while they do it."""

    subject: Subject
    """What is measured; there once it is built."""
    timed: TimedSteps
    """What the clock showed; there once the timing pass has had its turn."""

    def __init__(
        self,
        measure: MeasureConfig,
        device: torch.device,
        log: RankLog,
        folder: Path | None = None,
        *,
        meet: Callable[[], None] = lambda: None,
        known: frozenset[str] = frozenset(),
        instead: Mapping[str, type[RankPass]] | None = None,
    ) -> None:
        """Before anything is built: passes note what the rank holds until then.

        `folder` is for files, None where none is kept. `meet` is called before every collective between
        steps: ranks that go on when one has failed raise there. Passes in `known` are not run again.
        `instead` is other code for some passes.
        """
        self.measure = measure
        self.device = device
        self.log = log
        self.folder = folder
        self.later: list[Any] = []
        """What the full-length steps after the timed ones returned."""
        self.meet = meet
        self.watch = AttentionWatch()
        self.tap = CommunicationTap(self.watch)
        codes = instead or {}
        self.passes = {
            name: (codes.get(name) or rank_code(name))(self)
            for name, facts in PASSES.items()
            if name not in known and facts.is_asked(measure)
        }

    @property
    def shares_traced_step(self) -> bool:
        """A long step hides what inspecting costs; of short ones there is time for one more."""
        return self.measure.trace and self.timed.warmup == "short"

    @property
    def step_s(self) -> float:
        """Median seconds of the timed steps."""
        return statistics.median(self.timed.step_times_ms) / 1e3

    def building(self) -> AbstractContextManager[None]:
        """Around the building of the subject."""
        return self._all(lambda each: each.around_building())

    def window(self) -> AbstractContextManager[None]:
        """Around steps under the clock."""
        return self._all(lambda each: each.around_window())

    def steps(self, subject: Subject) -> Steps:
        """All passes over a built subject, one after another."""
        self.subject = subject
        for each in self.passes.values():
            each.before_steps()
        for each in self.passes.values():
            yield from each.run()

    def first_step(self) -> Steps:
        """The step that pays for all that happens only once."""
        yield StepRequest.BETWEEN
        with self.subject.seen(), self._all(lambda each: each.around_first_step()):
            yield StepRequest.FIRST

    def step(self, around: Around) -> Steps:
        """One step at full length, inside of this context."""
        yield StepRequest.BETWEEN
        with around():
            outcome = yield StepRequest.STEP
        self.later.append(outcome)

    @contextmanager
    def inspected(self) -> Iterator[None]:
        """Around a step that every pass looks at from inside: costs milliseconds, so never a timed one."""
        with self.subject.seen(), self.watched(), self._all(lambda each: each.around_inspected_step()):
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Only see attention begin and end: that costs microseconds."""
        with self.subject.watched(self.watch):
            yield
        self.watch.errors.raise_first()

    def parts(self) -> dict[str, Any]:
        """This rank's part of every section, by the pass's name."""
        found = {name: each.part() for name, each in self.passes.items()}
        return {name: part for name, part in found.items() if part is not None}

    def report(self) -> dict[str, Any]:
        """This rank's part of every section as JSON values, by the pass's name."""
        return {name: to_builtins(part) for name, part in self.parts().items()}

    @contextmanager
    def _all(self, around: Callable[[RankPass], AbstractContextManager[Any]]) -> Iterator[None]:
        """Enter the same context of every pass; the first pass's is outermost."""
        with ExitStack() as stack:
            for each in self.passes.values():
                stack.enter_context(around(each))
            yield
