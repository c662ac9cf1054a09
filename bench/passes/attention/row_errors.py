"""How far attention at full length is from float64, in ulps, for a few of its tokens.

All of a long sequence in float64 would take its square; the output and the query gradient of single tokens
take a row each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.passes.parity.attention import random_input
from bench.passes.subject import AttentionCall
from bench.strategies.strategy import Strategy

SAMPLED_TOKENS = 32
COMPARED = ("out", "dq")
ONLY_FINITE = ("dk", "dv")
"""A row of theirs takes all queries: no more is asked of them here than that they are numbers."""


class RowErrors:
    """The exact rows of some tokens, spread evenly over the sequence, the last one included.

    The first is left out: it sees one key only, so that its query's gradient is zero and has no ulp.
    Each rank knows the rows of the tokens it holds; `of_shard` and `of_whole` compare with them.
    """

    def __init__(self, strategy: Strategy, device: torch.device, *, causal: bool) -> None:
        self.cell, self.device, self.causal = strategy.cell, device, causal
        seq_len = self.cell.seq_len
        rows = torch.linspace(1, seq_len - 1, SAMPLED_TOKENS, dtype=torch.float64).long().unique()
        self.rows = rows[(rows > 0) & (rows < seq_len)]
        own_S = torch.cat([torch.arange(seq_len)[piece] for piece in strategy.slices(seq_len)])
        self.local = torch.isin(own_S, self.rows).nonzero().flatten()
        self.own_rows = own_S[self.local]

    def of_shard(self, call: AttentionCall) -> dict[str, float]:
        """Largest error of all ranks' sampled tokens by tensor, in ulps; every rank must call it.

        Infinite where any token, sampled or not, is not finite on any rank; so are `dk` and `dv`, which
        are left out where they are finite.
        """
        compared = self._ulps((call.out, call.dq), self.local, self._exact(self.own_rows))
        others = [_zero_or_infinite(x) for x in (call.dk, call.dv)]
        largest = torch.stack([*compared, *others])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        errors = dict(zip(COMPARED + ONLY_FINITE, largest.tolist(), strict=True))
        return {name: error for name, error in errors.items() if name in COMPARED or error}

    def of_whole(self, out_BNTD: Tensor, dq_BNTD: Tensor) -> dict[str, float]:
        """The errors of the compared tensors of whole sequences on one rank, which alone calls it."""
        ulps = self._ulps((out_BNTD, dq_BNTD), self.rows, self._exact(self.rows))
        return {name: float(error) for name, error in zip(COMPARED, ulps, strict=True)}

    def _ulps(self, found: Sequence[Tensor], rows: Tensor, exact: Sequence[Tensor]) -> list[Tensor]:
        rows = rows.to(self.device)
        return [_largest(a, rows, b) for a, b in zip(found, exact, strict=True)]

    def _exact(self, rows: Tensor) -> list[Tensor]:
        """Output and query gradient of these tokens in float64, [B, N, rows, D], head by head."""
        q, k, v, dout = (random_input(self.cell, i, self.cell.seq_len, self.device) for i in range(4))
        rows = rows.to(self.device)
        hidden_RT = torch.arange(k.shape[2], device=self.device) > rows[:, None]
        mask_RT = hidden_RT if self.causal else torch.zeros_like(hidden_RT)
        group = q.shape[1] // k.shape[1]
        by_head = [
            _rows(
                q[:, head, rows].double(),
                k[:, head // group].double(),
                v[:, head // group].double(),
                dout[:, head, rows].double(),
                mask_RT,
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


def _largest(found: Tensor, rows: Tensor, exact: Tensor) -> Tensor:
    """The largest error of these rows, 0 of none; infinite where any row is not finite.

    Not nan: what the largest of nan and a number is, is up to each library.
    """
    ulps = error_ulps(found[:, :, rows], exact)
    largest = ulps.amax() if ulps.numel() else ulps.sum()
    return torch.where(found.isfinite().all(), largest, torch.inf)


def _zero_or_infinite(found: Tensor) -> Tensor:
    """0 where all numbers are finite, else infinity."""
    zero = torch.zeros((), dtype=torch.float64, device=found.device)
    return torch.where(found.isfinite().all(), zero, torch.inf)


def _rows(
    q_BRD: Tensor, k_BTD: Tensor, v_BTD: Tensor, dout_BRD: Tensor, hidden_RT: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and gradient of a few queries: dq = P * (dP - (dout . out)) K / sqrt(D)."""
    scale = q_BRD.shape[-1] ** -0.5
    scores_BRT = (q_BRD @ k_BTD.transpose(1, 2) * scale).masked_fill(hidden_RT, float("-inf"))
    probs_BRT = scores_BRT.softmax(dim=-1)
    out_BRD = probs_BRT @ v_BTD
    dprobs_BRT = dout_BRD @ v_BTD.transpose(1, 2)
    dscores_BRT = probs_BRT * (dprobs_BRT - (dout_BRD * out_BRD).sum(dim=-1, keepdim=True))
    return out_BRD, dscores_BRT @ k_BTD * scale
