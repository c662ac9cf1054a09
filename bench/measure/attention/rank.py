"""The attention pass on a rank: times and errors of each timed call, and of the same kernel on one device.

The ideal time of P ranks is the time of one device divided by P.

Shapes: B sequences, N query heads, R sampled tokens (rows), T tokens of a sequence, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from bench.attention.kernels import attend
from bench.measure.attention.inputs import whole_input
from bench.measure.attention.section import AttentionSection
from bench.measure.full_length.shards import attention_rows, hidden_keys
from bench.measure.parity.exact import Tensors
from bench.measure.rank_pass import RankPass, StepRequests
from bench.measure.subject import AttentionCall
from bench.measure.timing.clock import StepClock
from bench.ranks.out_of_memory import exhausted_resource
from bench.strategies.strategy import Strategy

SAMPLED_TOKENS = 32
COMPARED = ("out", "dq")
ONLY_FINITE = ("dk", "dv")  # an exact row of them takes the scores of all queries
MAX_CALLS = 5
"""Largest number of timed calls on one device after the first call."""


class RowErrors:
    """Errors of sampled tokens against float64; the tokens are spread evenly and include the last one.

    Float64 attention of a whole sequence takes memory that grows with the square of its length, while the
    output and the query gradient of one token take one row of scores each. The first token is never sampled:
    it sees one key only, so that its query's gradient is zero and has no ulp. Each rank computes the exact
    rows of the sampled tokens in its shard.
    """

    def __init__(self, strategy: Strategy, device: torch.device, call: int, *, causal: bool) -> None:
        self.strategy, self.cell, self.call = strategy, strategy.cell, call
        self.device, self.causal = device, causal
        seq_len = self.cell.seq_len
        sampled = torch.linspace(1, seq_len - 1, SAMPLED_TOKENS, dtype=torch.float64).long().unique()
        self.tokens = sampled[(sampled > 0) & (sampled < seq_len)]
        shard_S = torch.cat([torch.arange(seq_len)[piece] for piece in strategy.slices(seq_len)])
        self.shard_indices = torch.isin(shard_S, self.tokens).nonzero().flatten()
        self.shard_tokens = shard_S[self.shard_indices]

    def shard_errors(self, call: AttentionCall) -> dict[str, float]:
        """Return the largest error of all ranks' sampled tokens by tensor, in ulps.

        Every rank must call it. An error is infinite if any token, sampled or not, is not finite on any
        rank. `dk` and `dv` are included only in that case.
        """
        ulps = self._errors_of((call.out, call.dq), self.shard_indices, self.shard_tokens)
        ulps += [torch.where(x.isfinite().all(), 0.0, torch.inf).double() for x in (call.dk, call.dv)]
        largest = torch.stack(ulps)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        errors = dict(zip(COMPARED + ONLY_FINITE, largest.tolist(), strict=True))
        return {name: error for name, error in errors.items() if name in COMPARED or error}

    def whole_errors(self, out_BNTD: Tensor, dq_BNTD: Tensor) -> dict[str, float]:
        """Return the largest error by tensor, in ulps, of whole sequences that this rank alone holds."""
        ulps = self._errors_of((out_BNTD, dq_BNTD), self.tokens, self.tokens)
        return {name: float(error) for name, error in zip(COMPARED, ulps, strict=True)}

    def inputs(self) -> Tensors:
        """Return q, k, v and the gradient of the output of whole sequences, [B, heads, T, D]."""
        return tuple(whole_input(self.strategy, index, self.call, self.device) for index in range(4))

    def _errors_of(self, results: Sequence[Tensor], indices: Tensor, tokens: Tensor) -> list[Tensor]:
        """Return the largest error of output and query gradient at `tokens`, whose rows are `indices`."""
        indices = indices.to(self.device)
        return [
            _largest_ulps(result, indices, exact)
            for result, exact in zip(results, self._exact_rows(tokens), strict=True)
        ]

    def _exact_rows(self, tokens: Tensor) -> list[Tensor]:
        """Return output and query gradient of these tokens in float64, both [B, N, R, D], head by head."""
        q, k, v, dout = self.inputs()
        tokens = tokens.to(self.device)
        keys = torch.arange(k.shape[2], device=self.device)
        hidden_RT = hidden_keys(keys, tokens, None, causal=self.causal)
        heads_per_kv, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        heads = [
            attention_rows(
                q[:, head, tokens],
                k[:, head // heads_per_kv],
                v[:, head // heads_per_kv],
                dout[:, head, tokens],
                hidden_RT,
                scale,
            )
            for head in range(q.shape[1])
        ]
        return [torch.stack(rows, dim=1) for rows in zip(*heads, strict=True)]


def error_ulps(result: Tensor, exact: Tensor) -> Tensor:
    """Return each row's largest deviation, in ulps of the row's largest exact number, [B, N, R]."""
    deviation = (result.double() - exact).abs().amax(dim=-1)
    return deviation / ulp(exact.abs().amax(dim=-1), result.dtype)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of `dtype` at these values, in float64."""
    return torch.finfo(dtype).eps * value.double().log2().floor().exp2()


def _largest_ulps(result: Tensor, indices: Tensor, exact: Tensor) -> Tensor:
    """Return the largest error of the rows `indices`, 0 without rows; infinite if `result` is not all finite.

    The error is never nan, because communication libraries disagree about the maximum of nan and a number.
    """
    ulps = error_ulps(result[:, :, indices], exact)
    largest = ulps.amax() if ulps.numel() else ulps.sum()
    return torch.where(result.isfinite().all(), largest, torch.inf)


class AttentionPass(RankPass):
    section: AttentionSection | None = None

    def run(self) -> StepRequests:
        call, strategy = self.measurement.subject.attention_call(), self.measurement.subject.strategy
        if call is not None and strategy is not None:
            with self.measurement.log.run_phase("attention"):
                self.section = self._measure(call, strategy)
        yield from ()

    def part(self) -> AttentionSection | None:
        return self.section

    def _measure(self, call: AttentionCall, strategy: Strategy) -> AttentionSection:
        """Return times and errors of the timed calls; every rank must call it.

        The section of the first rank that runs also has times and errors of the cell's kernel on whole
        sequences, or the reason for not having them.
        """
        subject, timed = self.measurement.subject, self.measurement.timed
        clocks = [self.measurement.outcomes[number] for number in timed.numbers]
        forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in clocks), strict=True)
        row_errors = RowErrors(strategy, subject.device, call.number, causal=subject.causal)
        errors = row_errors.shard_errors(call)
        if strategy.cell.replay.rank is not None:  # without other ranks' numbers, results need only be finite
            errors = {name: error for name, error in errors.items() if error == math.inf}
        section = AttentionSection(
            forward_ms=[[*forward_ms]],
            backward_ms=[[*backward_ms]],
            error_ulps=errors,
            error_rows=len(row_errors.tokens),
        )
        if strategy.groups.rank == strategy.cell.running_ranks[0]:
            try:
                section = _add_one_device(section, strategy, row_errors)
            except (RuntimeError, MemoryError) as error:
                if exhausted_resource(error, limited=True).memory is None:
                    raise
                section = replace(section, one_device_reason="whole sequences do not fit on one device")
        dist.barrier()
        return section


def _add_one_device(section: AttentionSection, strategy: Strategy, row_errors: RowErrors) -> AttentionSection:
    """Return the section with times and errors of the cell's kernel on whole sequences on this device."""
    cell = strategy.cell
    *qkv, dout = row_errors.inputs()
    leaves = [x.requires_grad_() for x in qkv]
    clocks: list[StepClock] = []
    calls = 1
    # The first call warms up, unless it uses up the budget. Then it is the only call and therefore timed.
    while len(clocks) < calls:
        for leaf in leaves:
            leaf.grad = None
        clock = StepClock(row_errors.device)
        clock.mark()
        out = attend(*leaves, kernel=strategy.kernel, causal=row_errors.causal)
        clock.mark()
        out.backward(dout)
        clock.mark()
        clocks.append(clock)
        call_ms = sum(clock.step_times_ms())  # waits for the call
        if len(clocks) == 1:
            calls = 1 + min(MAX_CALLS, int(cell.measure.budget_s * 1e3 / call_ms))
    timed = clocks[1:] or clocks
    forward_ms, backward_ms = zip(*(clock.step_times_ms() for clock in timed), strict=True)
    assert leaves[0].grad is not None
    return replace(
        section,
        one_device_forward_ms=[*forward_ms],
        one_device_backward_ms=[*backward_ms],
        control_error_ulps=row_errors.whole_errors(out.detach(), leaves[0].grad),
    )


PASS = AttentionPass
