"""One step looked at from inside: what attention was given, what collectives carried, whose code ran."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from bench.measure.calls import CollectiveCall
from bench.measure.engagement.section import EngagementSection
from bench.measure.rank_pass import RankPass, Steps
from bench.measure.tap import group_named
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
EVERY_STRATEGY = "bench.strategies.strategy"
"""The base class of all strategies: entered whichever runs."""


class EngagementPass(RankPass):
    modules: frozenset[str] = frozenset()

    @contextmanager
    def around_first_step(self) -> Iterator[None]:
        with watch_modules(self.measurement.subject.attention_code) as modules:
            yield
        self.modules = frozenset(modules)

    def around_inspected_step(self) -> AbstractContextManager[Any]:
        return self.measurement.tap

    def run(self) -> Steps:
        if self.measurement.shares_traced_step:
            return
        with self.measurement.log.during("engagement", 1, self.measurement.step_s):
            yield from self.measurement.step(self.measurement.inspected)

    def part(self) -> EngagementSection:
        measurement, strategy = self.measurement, self.measurement.subject.strategy
        is_replay = strategy is not None and strategy.cell.replay.rank is not None
        return EngagementSection(
            attention_name=measurement.subject.attention_name,
            modules=sorted(self.modules),
            attention_shapes=[sorted(map(list, measurement.watch.shapes))],
            sent_bytes={name: [sent] for name, sent in measurement.tap.sent_bytes().items()},
            calls=measurement.tap.calls_by_kind(),
            messages=messages_of(measurement.tap.calls) if is_replay else None,
        )


def messages_of(calls: Sequence[CollectiveCall]) -> list[Messages]:
    """Count equal calls; the ranks of a send or receive are those of its whole group."""
    counts = Counter[tuple[str, Communication]]()
    for call in calls:
        ranks = dist.get_process_group_ranks(group_named(call.group))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        moved_bytes = call.received_bytes if call.kind == "recv" else call.sent_bytes
        counts[call.purpose, Communication(call.kind, moved_bytes, len(ranks), stride)] += 1
    return [Messages(purpose, exchange, count) for (purpose, exchange), count in counts.items()]


@contextmanager
def watch_modules(own_code: str) -> Iterator[set[str]]:
    """The names of attention modules entered by this thread, forward and (on CPU) backward.

    Modules whose names begin with `own_code` count, wherever they were installed from. None where the thread
    is profiled already, as by cProfile, which could not be switched on again from here.
    """
    seen: set[str] = set()
    if sys.getprofile() is not None:
        yield seen
        return
    packages = (*ATTENTION_CODE, own_code)
    known: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        # This runs at every return, too, and at every call of C: some hundred thousand times in a step.
        if event != "call":
            return
        # Of code without a module this is anything; an error here would be the step's.
        module = str(frame.f_globals.get("__name__", ""))
        if module not in known:
            known.add(module)
            if module.startswith(packages) and module != EVERY_STRATEGY:
                seen.add(module)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


PASS = EngagementPass
