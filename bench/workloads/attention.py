"""Attention alone: one call, forward and backward, on random inputs of the cell's shape."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.passes.parity.attention import random_input
from bench.passes.subject import AttentionCall
from bench.passes.timing.clock import StepClock
from bench.workloads.workload import Rank, Workload


class Attention(Workload):
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
        self.out = self.leaves[0]  # what the last call came to is not this one's memory
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

    def attention_call(self) -> AttentionCall:
        dq, dk, dv = (leaf.grad for leaf in self.leaves if leaf.grad is not None)
        return AttentionCall(self.out.detach(), dq, dk, dv)

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
