"""Attention alone: its times call by call, its error, and the same kernel on one device.

The ideal time of P ranks is the time of one device divided by P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from bench.attention.kernels import attend
from bench.measure.attention.section import AttentionSection
from bench.measure.full_length.shards import hidden_keys, rows
from bench.measure.parity.rank import laid_out_as_by_a_model, random_input
from bench.measure.rank_pass import RankPass, Steps
from bench.measure.subject import AttentionCall
from bench.measure.timing.clock import StepClock
from bench.ranks.out_of_memory import memory_of_error
from bench.strategies.strategy import Strategy

SAMPLED_TOKENS = 32
COMPARED = ("out", "dq")
ONLY_FINITE = ("dk", "dv")
"""A row of theirs takes all queries: no more is asked of them here than that they are numbers."""


class RowErrors:
    """The exact rows of some tokens, spread evenly over the sequence, the last one included.

    All of a long sequence in float64 would take its square; the output and the query gradient of single
    tokens take a row each. The first is left out: it sees one key only, so that its query's gradient is zero
    and has no ulp. Each rank knows the rows of the tokens it holds; `of_shard` and `of_whole` compare with
    them.
    """

    def __init__(self, strategy: Strategy, device: torch.device, *, causal: bool) -> None:
        self.cell, self.device, self.causal = strategy.cell, device, causal
        seq_len = self.cell.seq_len
        sampled = torch.linspace(1, seq_len - 1, SAMPLED_TOKENS, dtype=torch.float64).long().unique()
        self.rows = sampled[(sampled > 0) & (sampled < seq_len)]
        own_S = torch.cat([torch.arange(seq_len)[piece] for piece in strategy.slices(seq_len)])
        self.local = torch.isin(own_S, self.rows).nonzero().flatten()
        self.own_rows = own_S[self.local]

    def of_shard(self, call: AttentionCall) -> dict[str, float]:
        """Largest error of all ranks' sampled tokens by tensor, in ulps; every rank must call it.

        Infinite where any token, sampled or not, is not finite on any rank; so are `dk` and `dv`, which
        are left out where they are finite.
        """
        compared = self._ulps((call.out, call.dq), self.local, self.own_rows)
        others = [torch.where(x.isfinite().all(), 0.0, torch.inf).double() for x in (call.dk, call.dv)]
        largest = torch.stack([*compared, *others])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        errors = dict(zip(COMPARED + ONLY_FINITE, largest.tolist(), strict=True))
        return {name: error for name, error in errors.items() if name in COMPARED or error}

    def of_whole(self, out_BNTD: Tensor, dq_BNTD: Tensor) -> dict[str, float]:
        """The errors of the compared tensors of whole sequences on one rank, which alone calls it."""
        ulps = self._ulps((out_BNTD, dq_BNTD), self.rows, self.rows)
        return {name: float(error) for name, error in zip(COMPARED, ulps, strict=True)}

    def _ulps(self, found: Sequence[Tensor], local: Tensor, tokens: Tensor) -> list[Tensor]:
        """Largest errors of these tokens, which are `local` in what was found."""
        local = local.to(self.device)
        return [_largest(a, local, b) for a, b in zip(found, self._exact(tokens), strict=True)]

    def _exact(self, at: Tensor) -> list[Tensor]:
        """Output and query gradient of these tokens in float64, [B, N, rows, D], head by head."""
        q, k, v, dout = (random_input(self.cell, i, self.cell.seq_len, self.device) for i in range(4))
        at = at.to(self.device)
        hidden_RT = hidden_keys(torch.arange(k.shape[2], device=self.device), at, None, causal=self.causal)
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        by_head = [
            rows(
                q[:, head, at], k[:, head // group], v[:, head // group], dout[:, head, at], hidden_RT, scale
            )
            for head in range(q.shape[1])
        ]
        return [torch.stack(heads, dim=1) for heads in zip(*by_head, strict=True)]


def error_ulps(found: Tensor, exact: Tensor) -> Tensor:
    """Each row's largest deviation in ulps of its own largest number, [B, N, rows]."""
    deviation = (found.double() - exact).abs().amax(dim=-1)
    return deviation / ulp(exact.abs().amax(dim=-1), found.dtype)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of `dtype` at these sizes, in float64."""
    return torch.finfo(dtype).eps * value.double().log2().floor().exp2()


def _largest(found: Tensor, local: Tensor, exact: Tensor) -> Tensor:
    """The largest error of these rows, 0 of none; infinite where any row is not finite.

    Not nan: what the largest of nan and a number is, is up to each library.
    """
    ulps = error_ulps(found[:, :, local], exact)
    largest = ulps.amax() if ulps.numel() else ulps.sum()
    return torch.where(found.isfinite().all(), largest, torch.inf)


MAX_CALLS = 5


class AttentionPass(RankPass):
    calls: AttentionSection | None = None

    def run(self) -> Steps:
        call, strategy = self.measurement.subject.attention_call(), self.measurement.subject.strategy
        if call is not None and strategy is not None:
            with self.measurement.log.during("attention"):
                self.calls = self._measured(call, strategy)
        yield from ()

    def part(self) -> AttentionSection | None:
        return self.calls

    def _measured(self, call: AttentionCall, strategy: Strategy) -> AttentionSection:
        """The calls with those of the cell's kernel on whole sequences beside; every rank must call it."""
        subject, timed = self.measurement.subject, self.measurement.timed
        clocks = timed.outcomes[-len(timed.step_times_ms) :]
        forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in clocks), strict=True)
        errors = RowErrors(strategy, subject.device, causal=subject.causal)
        error_ulps = errors.of_shard(call)
        if strategy.cell.replay.rank is not None:  # without other ranks' numbers, results need only be finite
            error_ulps = {name: error for name, error in error_ulps.items() if error == math.inf}
        found = AttentionSection(
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
                found = replace(found, one_device_reason="whole sequences do not fit on one device")
        dist.barrier()
        return found


def _beside_single_device(found: AttentionSection, strategy: Strategy, errors: RowErrors) -> AttentionSection:
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
        one_device_forward_ms=[*forward_ms],
        one_device_backward_ms=[*backward_ms],
        control_error_ulps=control,
    )


PASS = AttentionPass
