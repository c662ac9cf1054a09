"""Attention alone: its times call by call, its error, and the same kernel on one device."""

from __future__ import annotations

from bench.passes.attention.row_errors import RowErrors
from bench.passes.attention.section import AttentionCalls
from bench.passes.attention.single_device import beside_single_device
from bench.passes.facts import of_one
from bench.passes.rank_pass import RankPass, Steps


class AttentionPass(RankPass):
    calls: AttentionCalls | None = None

    def run(self) -> Steps:
        if self.measurement.subject.attention_call() is not None:
            with self.measurement.log.during("attention"):
                self.calls = self._measured()
        yield from ()

    def part(self) -> AttentionCalls | None:
        return self.calls

    def _measured(self) -> AttentionCalls:
        subject, timed = self.measurement.subject, self.measurement.timed
        call, strategy = subject.attention_call(), subject.strategy
        assert call is not None
        assert strategy is not None
        clocks = timed.outcomes[-len(timed.step_times_ms) :]
        forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in clocks), strict=True)
        errors = RowErrors(strategy, subject.device, causal=subject.causal)
        found = AttentionCalls(
            forward_ms=[[*forward_ms]],
            backward_ms=[[*backward_ms]],
            error_ulps=errors.of_shard(call),
            error_rows=len(errors.rows),
            added_ms=of_one(subject.added_ms(len(clocks))),
        )
        return beside_single_device(found, strategy, subject.device, errors, causal=subject.causal)


PASS = AttentionPass
