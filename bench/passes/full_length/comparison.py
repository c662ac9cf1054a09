"""One call of attention, held in shards by some ranks, against float64.

Output and query gradient of some tokens are compared with float64, which takes a row of scores each. For the
gradients of keys and values a row is no shorter than all scores, so two identities are asked instead, over
all tokens and exact in exact arithmetic, with P the weights and dS the gradients of the scores:

    sum_j dV_j V_j^T = sum_ij P_ij dO_i V_j^T = sum_i dO_i O_i^T
    sum_j dK_j K_j^T = sum_ij dS_ij Q_i K_j^T = sum_i Q_i dQ_i^T   (the scale is in dK and dQ)

Whatever is wrong in P and dS themselves shows in the sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.finite import worst
from bench.passes.full_length.rows import Rows
from bench.passes.full_length.section import SAMPLED_ROWS, FullLength
from bench.training.models import TORCH_DTYPES

FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
"""Of rows, where control and strategy both err by rounding alone; for `out` in 16 bit the control decides."""
ROW_FACTOR = 2.5
"""A sound result errs at most so many times as much as the control does."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-2, "bf16": 3e-2}
"""Of `dq`: torch's own kernel on a CPU errs more the longer the sequence, in bf16 by 6e-3 at 32k."""
IDENTITY_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""The same kernel adds `dk` and `dv` up in few bits, so that in 16 bit only gross errors are told from it."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How the ranks that share a sequence hold it, seen from one of them; every rank takes part in a call."""

    positions: Tensor
    """Of the tokens that this rank holds."""
    ranks: int
    whole: Callable[[Tensor], Tensor]
    """[B, T, D] in token order from this rank's [B, S, D] and the others'."""
    summed: Callable[[Tensor], Tensor]
    """The sum over all of them."""
    seed: int
    """Another on every rank: it draws the rows."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What was computed: in which dtype, with which scale of the scores and which mask."""

    dtype: str
    scale: float
    causal: bool


def compare(x: Mapping[str, Tensor], attention: Attention, shards: Shards) -> FullLength:
    """Errors and limits of one call, the same on every rank that shares the sequence.

    `x` are q, k, v, out and their gradients, [B, heads, S, D] of this rank's shard.
    """
    held, dtype = len(shards.positions), attention.dtype
    local = drawn(held, -(-SAMPLED_ROWS // shards.ranks), shards.seed)
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, (error, control) in _row_errors(x, attention, shards, local.to(x["q"].device)).items():
        floor = GRADIENT_FLOORS[dtype] if name == "dq" else FLOORS.get(dtype, 0.0)
        errors[name], limits[name] = error, max(floor, ROW_FACTOR * control)
    for name, error in _identity_errors(x, shards).items():
        errors[name], limits[name] = error, IDENTITY_LIMITS[dtype]
    return FullLength(
        tokens=held * shards.ranks, rows=len(local) * shards.ranks, errors=errors, limits=limits
    )


def drawn(held: int, count: int, seed: int) -> Tensor:
    """Which of a rank's tokens are sampled, its last one always."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(held - 1, generator=generator)[: min(held, count) - 1]
    return torch.cat([others, torch.tensor([held - 1])])


def _row_errors(
    x: Mapping[str, Tensor], attention: Attention, shards: Shards, local: Tensor
) -> dict[str, tuple[float, float]]:
    """The call's and the control's relative error of all ranks' sampled rows, by tensor."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    positions_R = shards.positions.to(local.device)[local]
    squares = torch.zeros(2, 3, dtype=torch.float64, device=local.device)  # found, control, exact
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (shards.whole(x[name][:, head]) for name in ("k", "v"))
        hidden_RT = torch.arange(k_BTD.shape[1], device=k_BTD.device) > positions_R[:, None]
        for query in range(head * shared, (head + 1) * shared):
            own = {name: x[name][:, query].index_select(1, local) for name in ("q", "out", "dq", "dout")}
            hidden = hidden_RT if attention.causal else torch.zeros_like(hidden_RT)
            rows = Rows(own["q"], k_BTD, v_BTD, own["dout"], hidden, attention.scale)
            control = rows.rounded(TORCH_DTYPES[attention.dtype])
            compared = zip((own["out"], own["dq"]), control, rows.exact(), strict=True)
            for which, (found, plain, exact) in enumerate(compared):
                each = (found.double() - exact, plain.double() - exact, exact)
                squares[which] += torch.stack([part.square().sum() for part in each])
    found, control, exact = shards.summed(squares).sqrt().T.tolist()
    return {
        name: (found[at] / exact[at], control[at] / exact[at]) if exact[at] else (found[at], 0.0)
        for at, name in enumerate(("out", "dq"))
    }


def _identity_errors(x: Mapping[str, Tensor], shards: Shards) -> dict[str, float]:
    """By how much the sums over keys and over queries differ, relative to both and to their terms."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    errors = {}
    for name, keys, queries in (("dk", ("dk", "k"), ("q", "dq")), ("dv", ("dv", "v"), ("dout", "out"))):
        missed = []
        for head in range(x["k"].shape[1]):
            own, of_group = slice(head, head + 1), slice(head * shared, (head + 1) * shared)
            over_keys, key_terms = _products(x, keys, own)
            over_queries, query_terms = _products(x, queries, of_group)
            sums = [shards.summed(each) for each in (over_keys, over_queries)]
            terms = shards.summed(key_terms + query_terms)
            size = (terms + sum(each.square().sum() for each in sums)).sqrt()
            difference = (sums[0] - sums[1]).norm()
            missed.append(float(difference / size) if size else float(difference))
        errors[name] = worst(missed)
    return errors


def _products(x: Mapping[str, Tensor], names: tuple[str, str], heads: slice) -> tuple[Tensor, Tensor]:
    """Over this rank's tokens: the sum of outer products, [D, D], and of their squared sizes."""
    a, b = (x[name][:, heads].double().flatten(0, 2) for name in names)
    return a.T @ b, (a.square().sum(-1) * b.square().sum(-1)).sum()
