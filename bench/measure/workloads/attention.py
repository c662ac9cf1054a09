"""Workload of attention alone: forward and backward of one call on random inputs of the cell's shape."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.parity.rank import random_input, with_model_strides
from bench.measure.subject import AttentionCall
from bench.measure.timing.clock import StepClock, synchronise
from bench.measure.workloads.workload import Workload, WorkloadRank


class AttentionWorkload(Workload):
    def __init__(self, rank: WorkloadRank) -> None:
        super().__init__(rank)
        self.causal = self.cell.workload.mask == "causal"
        q, k, v, self.dout = (self._random_shard(index) for index in range(4))
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.out = q

    def step(self, number: int) -> StepClock:  # noqa: ARG002  all calls are equal
        """Run one call; return a clock with marks at its start, after forward and at its end."""
        clock = StepClock(self.rank.device)
        for leaf in self.leaves:
            leaf.grad = None
        self.out = self.leaves[0]  # free the last output before this call
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
        """Run one call, and further calls for `measure.warmup_s` seconds.

        The timing pass limits its warm-up to a number of steps that suits training. The same number of
        attention calls may take too little time to warm up the device.
        """
        self.step(0)
        if self.cell.measure.warmup_s > 0:
            self._warm_up()

    def _warm_up(self) -> None:
        """Run calls for `measure.warmup_s` seconds, the same number on every rank."""
        synchronise(self.device)
        start = time.perf_counter()
        self.step(0)
        synchronise(self.device)
        call_s = torch.tensor(time.perf_counter() - start, device=self.device)
        dist.all_reduce(call_s, dist.ReduceOp.MAX)
        for _ in range(math.ceil(self.cell.measure.warmup_s / call_s.item())):
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

    def _random_shard(self, index: int) -> Tensor:
        """Return this rank's shard of `random_input(..., index, ...)`; the whole tensor is freed."""
        whole = random_input(self.cell, index, self.cell.seq_len, self.rank.device)
        pieces = self.rank.strategy.slices(whole.shape[2])
        return with_model_strides(torch.cat([whole[:, :, piece] for piece in pieces], dim=2))


WORKLOAD = AttentionWorkload
