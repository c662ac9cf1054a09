"""Workload of attention alone: forward and backward of calls on random inputs of the cell's shape."""

from __future__ import annotations

import math
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.attention.inputs import number_of_calls, random_rows, shard_of_call
from bench.measure.subject import AttentionCall
from bench.measure.timing.clock import StepClock, synchronise
from bench.measure.workloads.workload import Workload, WorkloadRank


class AttentionWorkload(Workload):
    def __init__(self, rank: WorkloadRank) -> None:
        super().__init__(rank)
        self.causal = self.cell.workload.mask == "causal"
        cell, group_rank = self.cell, rank.strategy.groups.sequence_rank
        rows = [random_rows(cell, index, group_rank, rank.device) for index in range(4)]
        self.inputs = [[shard_of_call(cell, x, call) for x in rows] for call in range(number_of_calls(cell))]
        """q, k, v and the gradient of the output of each call, made here so that a call makes nothing."""
        for qkv_dout in self.inputs:
            for leaf in qkv_dout[:3]:
                leaf.requires_grad_()
        shards = sum(x.nbytes for x in self.inputs[0])
        self.spare_bytes = sum(x.nbytes for x in rows) - shards
        self.number = 0
        self.out = rows[0]

    def step(self, number: int) -> StepClock:
        """Run one call; return a clock with marks at its start, after forward and at its end."""
        clock = StepClock(self.rank.device)
        for leaf in self.leaves:
            leaf.grad = None
        self.number = number % len(self.inputs)
        *_, dout = self.inputs[self.number]
        self.out = dout  # free the last output before this call
        clock.mark()
        self.rank.phase.enter("forward")
        self.out = self._forward()
        clock.mark()
        self.rank.phase.enter("backward")
        self.out.backward(dout)
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
        return AttentionCall(self.out.detach(), dq, dk, dv, self.number)

    @property
    def leaves(self) -> list[Tensor]:
        """q, k and v of the last call."""
        return self.inputs[self.number][:3]

    def _forward(self) -> Tensor:
        strategy = self.rank.strategy
        attention = partial(strategy.attention, causal=self.causal)
        if strategy.watch is None:
            return attention(*self.leaves)
        q, k, v = self.leaves
        return strategy.watch.run(attention, q, k, v)


WORKLOAD = AttentionWorkload
