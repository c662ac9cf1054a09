"""Base class of the passes of one rank, and the measurement that runs them.

A pass measures or checks one thing on the subject, which is the model or attention that is measured. It
yields a request for each step that it needs, and returns this rank's part of a section of the record. The
steps are run by a workload of the harness or by the user's training loop, so that the same passes measure
both.
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
from bench.measure import PASSES, load_pass_class
from bench.measure.subject import Subject
from bench.measure.tap import CommunicationTap
from bench.ranks.log import RankLog


class StepRequest(Enum):
    """Request of a pass to the workload or training loop that runs the steps."""

    BEFORE_NEXT_STEP = auto()
    """Resume the pass just before the next step, so that its instruments see that step only."""
    FIRST = auto()
    """Run the cheapest step that triggers all one-time work, such as lazy imports."""
    STEP = auto()
    """Run one full-length step and send its result to the pass."""


StepRequests = Generator[StepRequest, Any, None]
"""Generator of a pass's requests; it is sent the result of each full-length step."""
ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Times of the timed steps of one rank."""

    step_times_ms: list[float]
    window_ms: float
    """Milliseconds from the start of the first timed step to the end of the last."""
    warmup: str
    end: int
    """Number of full-length steps that ended before or with the last timed step."""
    started_ns: list[int]
    """Start of each timed step, then the end of the last, by `time.time_ns`."""

    @property
    def numbers(self) -> range:
        """Numbers of the timed steps among all full-length steps."""
        return range(self.end - len(self.step_times_ms), self.end)


class RankPass:
    """One pass on one rank. Subclasses override only the methods that they need."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement

    def around_building(self) -> AbstractContextManager[Any]:
        """Return the context in which the subject is built."""
        return nullcontext()

    def around_first_step(self) -> AbstractContextManager[Any]:
        """Return the context of the short first step, which triggers all one-time work."""
        return nullcontext()

    def around_first_full_step(self) -> AbstractContextManager[Any]:
        """Return the context of the first full-length step, which lies outside of the step's timing."""
        return nullcontext()

    def around_window(self) -> AbstractContextManager[Any]:
        """Return the context of the window, all timed steps in a row. It must do nothing between them."""
        return nullcontext()

    def around_inspected_step(self) -> AbstractContextManager[Any]:
        """Return the context of the inspected step, a step with instruments that is not timed."""
        return nullcontext()

    def after_checked_steps(self) -> None:
        """Examine what the first few full-length steps did; every rank calls this between two steps."""

    def before_steps(self) -> None:
        """Prepare the pass before any step changes the parameters; every rank calls this."""

    def run(self) -> StepRequests:
        """Run the pass: yield a request for each step and receive its result; every rank calls this."""
        yield from ()

    def broadcast_count(self, count: int) -> int:
        """Return rank 0's `count` on every rank; every rank must call this."""
        decision = torch.tensor(count, device=self.measurement.subject.device)
        self.measurement.raise_if_rank_failed()
        dist.broadcast(decision, src=0)
        return int(decision.item())

    def part(self) -> Any:
        """Return what this rank adds to the section, a `PassFacts.part_type` or None, after the last step."""
        return None


class Measurement:
    """State of a measurement on one rank, which its passes share."""

    subject: Subject
    timed: TimedSteps

    def __init__(
        self,
        measure: MeasureConfig,
        device: torch.device,
        log: RankLog,
        folder: Path | None = None,
        *,
        raise_if_rank_failed: Callable[[], None] = lambda: None,
        skipped: frozenset[str] = frozenset(),
        replacements: Mapping[str, type[RankPass]] | None = None,
    ) -> None:
        """Create the passes, before the subject is built: some record the memory that is held without it.

        Args:
            measure: Settings of the measurement.
            device: Device of this rank.
            log: Log to which passes report their progress.
            folder: Folder for the files of the passes; None if no files are kept.
            raise_if_rank_failed: Function that raises if another rank has failed. Passes call it
                before every collective between steps.
            skipped: Names of passes that are not run, because another cell's record has their sections.
            replacements: Classes that replace those in a pass's `rank.py`, by name of the pass.
        """
        self.measure = measure
        self.device = device
        self.log = log
        self.folder = folder
        self.outcomes: list[Any] = []
        """Results of all full-length steps so far."""
        self.raise_if_rank_failed = raise_if_rank_failed
        self.watch = AttentionWatch()
        self.tap = CommunicationTap(self.watch)
        replacements = replacements or {}
        self.passes = {
            name: (replacements.get(name) or load_pass_class(name))(self)
            for name, facts in PASSES.items()
            if name not in skipped and facts.is_requested(measure)
        }

    @property
    def inspects_traced_step(self) -> bool:
        """True if the traced step is also the inspected step.

        If steps are long, the warm-up is short, and inspecting adds too little to distort the trace. If they
        are short, there is time for another step that is only inspected.
        """
        return self.measure.trace and self.timed.warmup == "short"

    @property
    def step_s(self) -> float:
        """Median seconds of the timed steps."""
        return statistics.median(self.timed.step_times_ms) / 1e3

    def around_building(self) -> AbstractContextManager[None]:
        return self._enter_all(lambda rank_pass: rank_pass.around_building())

    def around_first_full_step(self) -> AbstractContextManager[None]:
        return self._enter_all(lambda rank_pass: rank_pass.around_first_full_step())

    def around_window(self) -> AbstractContextManager[None]:
        return self._enter_all(lambda rank_pass: rank_pass.around_window())

    def after_checked_steps(self) -> None:
        for rank_pass in self.passes.values():
            rank_pass.after_checked_steps()

    def steps(self, subject: Subject) -> StepRequests:
        """Prepare all passes for the built subject, then run one after another; yield their requests."""
        self.subject = subject
        for rank_pass in self.passes.values():
            rank_pass.before_steps()
        for rank_pass in self.passes.values():
            yield from rank_pass.run()

    def first_step(self) -> StepRequests:
        """Request the short first step, in the contexts of all passes."""
        yield StepRequest.BEFORE_NEXT_STEP
        with (
            self.subject.around_untimed_step(),
            self._enter_all(lambda rank_pass: rank_pass.around_first_step()),
        ):
            yield StepRequest.FIRST

    def step(self, make_context: ContextFactory) -> StepRequests:
        """Request one full-length step that runs in a new context; its result goes to `outcomes`."""
        yield StepRequest.BEFORE_NEXT_STEP
        with make_context():
            outcome = yield StepRequest.STEP
        self.outcomes.append(outcome)

    @contextmanager
    def inspect_step(self) -> Iterator[None]:
        """Let all passes inspect the step in this context, which takes milliseconds and is never timed."""
        contexts = self._enter_all(lambda rank_pass: rank_pass.around_inspected_step())
        with self.subject.around_untimed_step(), self.watch_attention(), contexts:
            yield

    @contextmanager
    def watch_attention(self) -> Iterator[None]:
        """Record the start and end of the attention calls in this context, which costs microseconds."""
        with self.subject.watch_attention(self.watch):
            yield
        self.watch.errors.raise_first()

    def parts(self) -> dict[str, Any]:
        """Return the part of each pass by name, without passes that have none."""
        all_parts = {name: rank_pass.part() for name, rank_pass in self.passes.items()}
        return {name: part for name, part in all_parts.items() if part is not None}

    def report(self) -> dict[str, Any]:
        """Return the result of `parts` as JSON values."""
        return {name: to_builtins(part) for name, part in self.parts().items()}

    @contextmanager
    def _enter_all(self, context_of: Callable[[RankPass], AbstractContextManager[Any]]) -> Iterator[None]:
        """Enter one context of every pass; the context of the first pass is outermost."""
        with ExitStack() as stack:
            for rank_pass in self.passes.values():
                stack.enter_context(context_of(rank_pass))
            yield
