"""One step looked at from inside: what attention was given, what collectives carried, whose code ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bench.passes.engagement.modules import watch_modules
from bench.passes.engagement.section import Engagement
from bench.passes.rank_pass import RankPass, Steps


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

    def part(self) -> Engagement:
        measurement = self.measurement
        return Engagement(
            attention_name=measurement.subject.attention_name,
            modules=sorted(self.modules),
            attention_shapes=[sorted(map(list, measurement.watch.shapes))],
            sent_bytes={name: [sent] for name, sent in measurement.tap.sent_bytes().items()},
            calls=measurement.tap.calls_by_kind(),
        )


PASS = EngagementPass
