"""Attention alone: one call, forward and backward, on random inputs of the cell's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.passes.attention.row_errors import RowErrors
from bench.passes.attention.single_device import time_single_device
from bench.passes.parity.attention import ParityOutcome, check_parity, random_input
from bench.passes.timing.clock import StepClock
from bench.passes.timing.timing import TimedSteps
from bench.passes.workload import Rank, Workload


class Attention(Workload):
    own_phase = "attention"

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.causal = self.cell.workload.mask == "causal"
        q, k, v, self.dout = (self._shard(which) for which in range(4))
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.out = q

    def step(self, number: int) -> StepClock:  # noqa: ARG002  every call is the same
        """One call; the clock was marked at its start, between forward and backward, and at its end."""
        clock = StepClock(self.rank.device)
        for leaf in self.leaves:
            leaf.grad = None
        clock.mark()
        self.rank.phase.enter("forward")
        self.out = self._forward()
        clock.mark()
        self.rank.phase.enter("backward")
        self.out.backward(self.dout)
        self.rank.phase.enter(None)
        clock.mark()
        return clock

    def short_step(self) -> None:
        self.step(0)

    def checks(self) -> Mapping[str, Callable[[], ParityOutcome]]:
        check = partial(check_parity, self.rank.strategy, self.rank.device, causal=self.causal)
        return {"attention": check}

    def sections(self, timed: TimedSteps) -> dict[str, Any]:
        calls = timed.outcomes[-len(timed.step_times_ms) :]
        forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in calls), strict=True)
        errors = RowErrors(self.rank.strategy, self.rank.device, causal=self.causal)
        found = errors.of_shard(self.out.detach(), self.leaves[0].grad)
        single = time_single_device(self.rank.strategy, self.rank.device, errors, causal=self.causal)
        return {
            "attention": {
                "forward_ms": list(forward_ms),
                "backward_ms": list(backward_ms),
                "error_ulps": found,
                "error_rows": len(errors.rows),
                **asdict(single),
            }
        }

    def _forward(self) -> Tensor:
        strategy = self.rank.strategy
        attention = partial(strategy.attention, causal=self.causal)
        if strategy.watch is None:
            return attention(*self.leaves)
        q, k, v = self.leaves
        return strategy.watch.run(attention, q, k, v)

    def _shard(self, which: int) -> Tensor:
        """This rank's part of an input; the whole of it is there for a moment only."""
        whole = random_input(self.cell, which, self.cell.seq_len, self.rank.device)
        return torch.cat([whole[:, :, piece] for piece in self.rank.strategy.slices(whole.shape[2])], dim=2)
