"""Attention at the measured length, from one call inside the cell's own step.

Nothing is called again. Output and query gradient of some tokens are compared with float64, which takes a row
of scores each. For the gradients of keys and values a row is no shorter than all scores, so two identities
are asked instead, over all tokens and exact in exact arithmetic, with P the weights and dS the gradients of
the scores:

    sum_j dV_j V_j^T = sum_ij P_ij dO_i V_j^T = sum_i dO_i O_i^T
    sum_j dK_j K_j^T = sum_ij dS_ij Q_i K_j^T = sum_i Q_i dQ_i^T   (the scale is in dK and dQ)

Whatever is wrong in P and dS themselves shows in the sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.capture import CapturedCall
from bench.config import RunConfig
from bench.finite import worst
from bench.passes.full_length.rows import Rows
from bench.passes.full_length.section import SAMPLED_ROWS, FullLength
from bench.passes.rank_pass import Measurement, RankPass, Steps
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import Strategy

FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
"""Of rows, where control and strategy both err by rounding alone; for `out` in 16 bit the control decides."""
ROW_FACTOR = 2.5
"""A sound result errs at most so many times as much as the control does."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-2, "bf16": 3e-2}
"""Of `dq`: torch's own kernel on a CPU errs more the longer the sequence, in bf16 by 6e-3 at 32k."""
IDENTITY_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""The same kernel adds `dk` and `dv` up in few bits, so that in 16 bit only gross errors are told from it."""


class FullLengthPass(RankPass):
    found: FullLength | None = None

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.captured = CapturedCall(around=without_memory_limit)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        is_ours = self.measurement.subject.strategy is not None
        self.measurement.watch.captured = self.captured if is_ours else None
        try:
            yield
        finally:
            self.measurement.watch.captured = None

    def run(self) -> Steps:
        subject = self.measurement.subject
        if subject.strategy is not None:
            with self.measurement.log.during("full_length"), without_memory_limit():
                self.found = compare(self.captured, subject.strategy, subject.device, causal=subject.causal)
        yield from ()

    def part(self) -> FullLength | None:
        return self.found


def compare(captured: CapturedCall, strategy: Strategy, device: torch.device, *, causal: bool) -> FullLength:
    """Errors and limits of one call; every rank that shares the sequence must call it, and gets the same."""
    cell = strategy.cell
    if not captured.is_whole:
        reason = "attention was not called with gradients in the inspected step"
        return FullLength(tokens=cell.seq_len, rows=0, errors={}, limits={}, reason=reason)
    x = captured.on(device)
    own_S = torch.cat([torch.arange(cell.seq_len)[piece] for piece in strategy.slices(cell.seq_len)])
    local = drawn(len(own_S), cell, strategy.groups.rank)
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    rows = _row_errors(x, strategy, local.to(device), own_S[local].to(device), causal=causal)
    for name, (error, control) in rows.items():
        floor = GRADIENT_FLOORS[cell.dtype] if name == "dq" else FLOORS.get(cell.dtype, 0.0)
        errors[name], limits[name] = error, max(floor, ROW_FACTOR * control)
    for name, error in _identity_errors(x, strategy).items():
        errors[name], limits[name] = error, IDENTITY_LIMITS[cell.dtype]
    return FullLength(tokens=cell.seq_len, rows=len(local) * cell.sp_degree, errors=errors, limits=limits)


def drawn(held: int, cell: RunConfig, rank: int) -> Tensor:
    """Which of a rank's tokens are sampled: others in every cell and on every rank, its last one always."""
    generator = torch.Generator().manual_seed((int(cell.cell_id, 16) + rank) % 2**63)
    count = min(held, -(-SAMPLED_ROWS // cell.sp_degree))
    return torch.cat([torch.randperm(held - 1, generator=generator)[: count - 1], torch.tensor([held - 1])])


def _row_errors(
    x: Mapping[str, Tensor], strategy: Strategy, local: Tensor, positions: Tensor, *, causal: bool
) -> dict[str, tuple[float, float]]:
    """The strategy's and the control's relative error of all ranks' sampled rows, by tensor."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    squares = torch.zeros(2, 3, dtype=torch.float64, device=local.device)  # found, control, exact
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (_whole(strategy, x[name][:, head]) for name in ("k", "v"))
        hidden_RT = torch.arange(k_BTD.shape[1], device=k_BTD.device) > positions[:, None]
        for query in range(head * shared, (head + 1) * shared):
            own = {name: x[name][:, query].index_select(1, local) for name in ("q", "out", "dq", "dout")}
            hidden = hidden_RT if causal else torch.zeros_like(hidden_RT)
            rows = Rows(own["q"], k_BTD, v_BTD, own["dout"], hidden)
            compared = zip((own["out"], own["dq"]), rows.rounded(), rows.exact(), strict=True)
            for which, (found, control, exact) in enumerate(compared):
                each = (found.double() - exact, control.double() - exact, exact)
                squares[which] += torch.stack([part.square().sum() for part in each])
    found, control, exact = _summed(strategy, squares).sqrt().T.tolist()
    return {
        name: (found[at] / exact[at], control[at] / exact[at]) if exact[at] else (found[at], 0.0)
        for at, name in enumerate(("out", "dq"))
    }


def _identity_errors(x: Mapping[str, Tensor], strategy: Strategy) -> dict[str, float]:
    """By how much the sums over keys and over queries differ, relative to both and to their terms."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    errors = {}
    for name, keys, queries in (("dk", ("dk", "k"), ("q", "dq")), ("dv", ("dv", "v"), ("dout", "out"))):
        missed = []
        for head in range(x["k"].shape[1]):
            own, of_group = slice(head, head + 1), slice(head * shared, (head + 1) * shared)
            over_keys, key_terms = _products(x, keys, own)
            over_queries, query_terms = _products(x, queries, of_group)
            sums = [_summed(strategy, each) for each in (over_keys, over_queries)]
            terms = _summed(strategy, key_terms + query_terms)
            size = (terms + sum(each.square().sum() for each in sums)).sqrt()
            difference = (sums[0] - sums[1]).norm()
            missed.append(float(difference / size) if size else float(difference))
        errors[name] = worst(missed)
    return errors


def _products(x: Mapping[str, Tensor], names: tuple[str, str], heads: slice) -> tuple[Tensor, Tensor]:
    """Over this rank's tokens: the sum of outer products, [D, D], and of their squared sizes."""
    a, b = (x[name][:, heads].double().flatten(0, 2) for name in names)
    return a.T @ b, (a.square().sum(-1) * b.square().sum(-1)).sum()


def _whole(strategy: Strategy, shard_BSD: Tensor) -> Tensor:
    """[B, T, D] in token order from the shards of all ranks of the sequence."""
    sent = shard_BSD.contiguous()
    shards = [torch.empty_like(sent) for _ in range(strategy.cell.sp_degree)]
    dist.all_gather(shards, sent, group=strategy.groups.sequence)
    return strategy.unshard(shards)


def _summed(strategy: Strategy, own: Tensor) -> Tensor:
    """The sum over all ranks of the sequence."""
    total = own.clone()
    dist.all_reduce(total, group=strategy.groups.sequence)
    return total


PASS = FullLengthPass
