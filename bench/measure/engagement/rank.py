"""The engagement pass on a rank: attention's input shapes, collectives and modules in an inspected step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import torch.distributed as dist

from bench.measure.calls import CollectiveCall
from bench.measure.engagement.call_log import (
    RecordedCall,
    calls_by_span,
    recorded_sends,
    wall_clock_offset_ns,
)
from bench.measure.engagement.section import EngagementSection
from bench.measure.rank_pass import RankPass, StepRequests
from bench.measure.tap import process_group_by_name
from bench.strategies.schedule import Communication
from bench.training.messages import Messages

ATTENTION_CODE = (
    "bench.strategies.",
    "deepspeed.runtime.sequence_parallel",
    "ring_flash_attn",
    "ringmaster",
    "yunchang",
    "flash_attn",
    "torch.distributed.tensor.experimental",
)
"""Prefixes of the names of modules that hold code of attention."""
CLOCK_STEP_NS = 10_000_000
"""Change of the wall clock against the monotonic clock from which the recorder's times are not used."""
STRATEGY_BASE = "bench.strategies.strategy"
"""Module of the strategies' base class. It is not recorded, because every strategy enters it."""


class EngagementPass(RankPass):
    modules: frozenset[str] = frozenset()
    """Modules with attention code that this rank entered in the first step."""

    sends: Sequence[RecordedCall] = ()
    """Sends over gloo in the last window."""
    timed_calls: Sequence[Counter[str] | None] = ()
    """Calls of each timed step; None for a step of which the flight recorder lacks calls."""
    inspected_calls: Counter[str] | None = None
    """Calls of attention in the inspected step; None if some are missing, or if the wall clock was set."""
    clock_offset_ns: int
    """Offset of the wall clock from the monotonic clock before the timed steps."""

    @contextmanager
    def around_first_step(self) -> Iterator[None]:
        with watch_modules(self.measurement.subject.attention_modules) as modules:
            yield
        self.modules = frozenset(modules)

    @contextmanager
    def around_window(self) -> Iterator[None]:
        self.clock_offset_ns = wall_clock_offset_ns()
        if self.measurement.subject.strategy is None:  # a user's loop has no check of timed calls
            yield
            return
        with recorded_sends() as self.sends:
            yield

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        watch, first = self.measurement.watch, len(self.measurement.watch.spans_ns)
        with recorded_sends() as sends, self.measurement.tap:
            yield
        offset_ns = wall_clock_offset_ns()
        spans = [(start + offset_ns, end + offset_ns) for start, end in watch.spans_ns[first:]]
        calls = sum(filter(None, calls_by_span(spans, sends)), Counter[str]())
        tapped = [call for call in self.measurement.tap.calls if call.purpose == "attention"]
        is_complete = calls.total() >= sum(call.kind != "recv" for call in tapped)
        if is_complete and abs(offset_ns - self.clock_offset_ns) < CLOCK_STEP_NS:
            self.inspected_calls = calls

    def run(self) -> StepRequests:
        self.timed_calls = calls_by_span([*pairwise(self.measurement.timed.started_ns)], self.sends)
        if self.measurement.inspects_traced_step:
            return
        with self.measurement.log.run_phase("engagement", 1, self.measurement.step_s):
            yield from self.measurement.step(self.measurement.inspect_step)

    def part(self) -> EngagementSection:
        measurement, strategy = self.measurement, self.measurement.subject.strategy
        is_replay = strategy is not None and strategy.cell.replay.rank is not None
        return EngagementSection(
            attention_name=measurement.subject.attention_name,
            modules=sorted(self.modules),
            attention_shapes=[sorted(map(list, measurement.watch.shapes))],
            sent_bytes={name: [sent] for name, sent in measurement.tap.sent_bytes().items()},
            calls=measurement.tap.calls_by_kind(),
            **_compare_timed_calls(self.timed_calls, self.inspected_calls),
            messages=messages_of(measurement.tap.calls) if is_replay else None,
        )


def _compare_timed_calls(
    timed: Sequence[Counter[str] | None], inspected: Counter[str] | None
) -> dict[str, Any]:
    """Return the fields of the section about attention's calls in timed steps."""
    complete = {step: calls for step, calls in enumerate(timed) if calls is not None}
    kinds = inspected or Counter[str]()
    differences = (
        f"timed step {step} has {calls[kind]} calls of {kind}, and the inspected step has {count}"
        for step, calls in complete.items()
        for kind, count in kinds.items()
        if calls[kind] != count
    )
    return {"compared_steps": [len(complete) if kinds else 0], "call_differences": [next(differences, None)]}


def messages_of(calls: Sequence[CollectiveCall]) -> list[Messages]:
    """Return the calls, equal ones counted together. The ranks of a send or receive are its whole group."""
    counts = Counter[tuple[str, Communication]]()
    for call in calls:
        ranks = dist.get_process_group_ranks(process_group_by_name(call.group))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        moved_bytes = call.received_bytes if call.kind == "recv" else call.sent_bytes
        counts[call.purpose, Communication(call.kind, moved_bytes, len(ranks), stride)] += 1
    return [Messages(purpose, communication, count) for (purpose, communication), count in counts.items()]


@contextmanager
def watch_modules(own_code: str) -> Iterator[set[str]]:
    """Yield a set that receives the names of modules with attention code that this thread enters.

    These are the modules whose names begin with an entry of `ATTENTION_CODE` or with `own_code`. Backward is
    included on a CPU only, where it runs in this thread. The set stays empty if the thread is already
    profiled, for example by cProfile, because that profiler could not be switched on again from here.
    """
    entered: set[str] = set()
    if sys.getprofile() is not None:
        yield entered
        return
    packages = (*ATTENTION_CODE, own_code)
    looked_up: set[str] = set()

    def record_module(frame: FrameType, event: str, _: object) -> None:
        # Python also calls this at every return and every call of C, some hundred thousand times in a step.
        if event != "call":
            return
        # Code without a module may have any object here, and an error here would be raised in the step.
        module = str(frame.f_globals.get("__name__", ""))
        if module not in looked_up:
            looked_up.add(module)
            if module.startswith(packages) and module != STRATEGY_BASE:
                entered.add(module)

    sys.setprofile(record_module)
    try:
        yield entered
    finally:
        sys.setprofile(None)


PASS = EngagementPass
