"""Attention alone: its times call by call, its error, and the same kernel on one device.

P times what one device takes is what P ranks would take if sharing were free.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch.distributed as dist

from bench.attention.kernels import attend
from bench.passes.attention.row_errors import RowErrors
from bench.passes.attention.section import AttentionCalls
from bench.passes.parity.attention import laid_out_as_by_a_model, random_input
from bench.passes.rank_pass import RankPass, Steps
from bench.passes.subject import AttentionCall
from bench.passes.timing.clock import StepClock
from bench.ranks.out_of_memory import memory_of_error
from bench.strategies.strategy import Strategy

MAX_CALLS = 5


class AttentionPass(RankPass):
    calls: AttentionCalls | None = None

    def run(self) -> Steps:
        call, strategy = self.measurement.subject.attention_call(), self.measurement.subject.strategy
        if call is not None and strategy is not None:
            with self.measurement.log.during("attention"):
                self.calls = self._measured(call, strategy)
        yield from ()

    def part(self) -> AttentionCalls | None:
        return self.calls

    def _measured(self, call: AttentionCall, strategy: Strategy) -> AttentionCalls:
        """The calls with those of the cell's kernel on whole sequences beside; every rank must call it."""
        subject, timed = self.measurement.subject, self.measurement.timed
        clocks = timed.outcomes[-len(timed.step_times_ms) :]
        forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in clocks), strict=True)
        errors = RowErrors(strategy, subject.device, causal=subject.causal)
        error_ulps = errors.of_shard(call)
        if strategy.cell.replay.rank is not None:  # without other ranks' numbers, results need only be finite
            error_ulps = {name: error for name, error in error_ulps.items() if error == math.inf}
        found = AttentionCalls(
            forward_ms=[[*forward_ms]],
            backward_ms=[[*backward_ms]],
            error_ulps=error_ulps,
            error_rows=len(errors.rows),
        )
        if strategy.groups.rank == strategy.cell.running_ranks[0]:
            try:
                found = _beside_single_device(found, strategy, errors)
            except (RuntimeError, MemoryError) as error:
                if memory_of_error(error, limited=True) is None:
                    raise
                found = replace(found, single_reason="whole sequences do not fit on one device")
        dist.barrier()
        return found


def _beside_single_device(found: AttentionCalls, strategy: Strategy, errors: RowErrors) -> AttentionCalls:
    cell = strategy.cell
    *qkv, dout = (
        laid_out_as_by_a_model(random_input(cell, which, cell.seq_len, errors.device)) for which in range(4)
    )
    leaves = [x.requires_grad_() for x in qkv]
    clocks: list[StepClock] = []
    spent_ms, calls = 0.0, 1
    # The first call warms up; where it used up the budget it has to do.
    while len(clocks) < calls:
        for leaf in leaves:
            leaf.grad = None
        clock = StepClock(errors.device)
        clock.mark()
        out = attend(*leaves, kernel=strategy.kernel, causal=errors.causal)
        clock.mark()
        out.backward(dout)
        clock.mark()
        clocks.append(clock)
        spent_ms = sum(clock.step_times_ms())
        if len(clocks) == 1:
            calls = 1 + min(MAX_CALLS, int(cell.measure.budget_s * 1e3 / spent_ms))
    timed = clocks[1:] or clocks
    forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in timed), strict=True)
    assert leaves[0].grad is not None
    control = errors.of_whole(out.detach(), leaves[0].grad)
    return replace(
        found,
        single_forward_ms=[*forward_ms],
        single_backward_ms=[*backward_ms],
        control_error_ulps=control,
    )


PASS = AttentionPass
