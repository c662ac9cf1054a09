"""What the observed steps of a loop are used for, in order: one rank's part of every section."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.cell.passes import watched_window
from bench.cell.sections import Report
from bench.config import ConfigError
from bench.observation.attention import captured_attention, module_of, noted_dtype, watched_attention
from bench.observation.feeding import Feeding
from bench.observation.outcome import Wishes
from bench.observation.parity import DTYPE_WORDS, compare
from bench.observation.subject import Subject
from bench.observation.tokens import RankTokens, positions_of
from bench.passes.engagement.inspection import Inspection
from bench.passes.engagement.modules import watch_modules
from bench.passes.memory.memory import MemoryWatch
from bench.passes.telemetry.telemetry import Telemetry, open_nvml
from bench.passes.timing.clock import StepClock, synchronise
from bench.passes.trace.optimizer_spans import step_spans
from bench.passes.trace.trace import StepTracer, keep_or_remove, read_step, warm_profiler
from bench.ranks.log import TRACED_STEPS, RankLog

Boundaries = Generator[None, None, None]
"""Yields where a step begins and where it has ended, in turns; what follows the last end is work of ours."""

OTHER_STEPS = 1 + 1 + 1 + TRACED_STEPS
"""Beside warm-up and timing: the first, the compared, the inspected and the traced ones."""


@dataclass(slots=True)
class Steps:
    """One rank's observed steps; `report` is complete once `boundaries` has ended."""

    subject: Subject
    group: dist.ProcessGroup | None
    wishes: Wishes
    log: RankLog
    device: torch.device
    feeding: Feeding
    memory: MemoryWatch
    report: Report = field(default_factory=dict)
    dtype: str = "fp32"
    modules: Sequence[str] = ()

    def boundaries(self) -> Boundaries:
        """All steps, pass after pass. An error in a step closes it, and takes off whatever was put on."""
        yield from self._first()
        for _ in range(self.wishes.warmup_steps):
            yield
            yield
        yield from self._timed()
        yield from self._compared()
        inspection = Inspection(partial(watched_attention, self.subject.attention_name), self.memory.steady)
        yield from self._inspected(inspection)
        yield from self._traced(inspection)

    def _first(self) -> Boundaries:
        """The step that pays for what happens once; its memory is part of the whole life's."""
        with (
            self.log.during("timing"),
            watch_modules(module_of(self.subject.attention_name)) as modules,
            noted_dtype(self.subject.attention_name, self._note_dtype),
            step_spans(self.log.step),
            self.feeding.watched(),
            self.memory.life,
        ):
            yield
        self.modules = sorted(modules)
        self._note_size()
        yield

    def _note_size(self) -> RankTokens:
        """What the step that ended was fed; raises ConfigError where it trained on nothing that was seen."""
        tokens = self.feeding.tokens
        if tokens is None:
            raise ConfigError(
                "bench.observe: the step did not call the model with input_ids or inputs_embeds, gradients"
                " on; put forward and backward into the context, and hand over the model that is called"
            )
        size = (tokens.batch, tokens.length, tokens.micro_steps)
        self.report.setdefault("sizes", []).append(size)
        return tokens

    def _note_dtype(self, dtype: torch.dtype) -> None:
        self.dtype = DTYPE_WORDS.get(dtype, str(dtype))

    def _timed(self) -> Boundaries:
        """Nothing but marks of the clock, after one barrier."""
        clocks: list[StepClock] = []
        telemetry = Telemetry(partial(open_nvml, self.device))
        with watched_window(self.memory, telemetry):
            dist.barrier()
            synchronise(self.device)
            start = time.perf_counter()
            while True:
                clocks.append(StepClock(self.device))
                clocks[-1].mark()
                yield
                clocks[-1].mark()
                if len(clocks) == self.wishes.steps:
                    break
                yield
            synchronise(self.device)
            window_ms = (time.perf_counter() - start) * 1e3
        self.report["timing"] = {
            "step_times_ms": [clock.step_times_ms()[0] for clock in clocks],
            "window_ms": window_ms,
            "warmup": "full",
        }
        self.report["telemetry"] = asdict(telemetry.read())
        yield

    def _compared(self) -> Boundaries:
        """What the model was fed, and one layer's attention against float64."""
        with captured_attention(self.subject.attention_name) as captured, self.feeding.watched():
            yield
        tokens = self._note_size()
        self.report["tokens"] = asdict(tokens)
        with self.log.during("parity"):
            self.report["parity"] = compare(captured, [*positions_of(tokens)], self.group)
        yield

    def _inspected(self, inspection: Inspection) -> Boundaries:
        """Every collective, its bytes and purpose; live tensors on the CPU."""
        with (
            self.log.during("engagement"),
            step_spans(self.log.step),
            self.feeding.watched(),
            inspection.looking(),
        ):
            yield
        self._note_size()
        name = self.subject.attention_name
        self.report["engagement"] = inspection.engagement(name, self.modules)
        self.report["memory"] = asdict(self.memory.read()) | {"limit_base_bytes": None}
        yield

    def _traced(self, inspection: Inspection) -> Boundaries:
        with tempfile.TemporaryDirectory(prefix="observed-") as folder, self.log.during("trace"):
            optimizing = partial(step_spans, self.log.step)
            tracer = StepTracer(inspection.watch, optimizing, inspection.watching, self.device, Path(folder))
            warm_profiler(self.device)
            for number in range(TRACED_STEPS):
                with tracer.step():
                    yield
                if number + 1 < TRACED_STEPS:
                    yield
            traced = tracer.median()
            self.report["trace"] = read_step(traced, inspection.tap.calls, self.device.type)
            keep_or_remove(traced, Path(folder), keep=False)
