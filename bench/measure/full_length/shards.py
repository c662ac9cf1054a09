"""How the ranks that share a sequence hold one call of attention, and which of its tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.attention.documents import Documents


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
    """Another on every rank: it draws rows and keys."""
    first_keys: Tensor | None = None
    """The first key that each of these tokens sees, [B, S] on the CPU; None where that is the sequence's."""

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return len(self.positions) * self.ranks


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What was computed: in which dtype, with which scale of the scores and which mask."""

    dtype: str
    scale: float
    causal: bool


def first_keys(documents: Documents) -> Tensor:
    """The first key that each token of whole sequences sees, [B, T]."""
    rows = range(len(documents.ends))
    return torch.tensor([[of.start for of in documents.of(row) for _ in of] for row in rows])


def hidden_keys(keys: Tensor, queries: Tensor, first_keys: Tensor | None, *, causal: bool) -> Tensor:
    """Which keys at these positions a query may not see, [queries, keys]; [B, queries, keys] of documents."""
    hidden = keys > queries[:, None]
    hidden = hidden & causal
    return hidden if first_keys is None else hidden | (keys < first_keys[..., None])


def drawn(held: int, count: int, seed: int) -> Tensor:
    """Which of a rank's tokens are sampled, its last one always."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(held - 1, generator=generator)[: min(held, count) - 1]
    return torch.cat([others, torch.tensor([held - 1])])


def rows(
    q_BRD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    dout_BRD: Tensor,
    hidden: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output and gradient of some queries of one head: dq = P * (dP - (dout . out)) K * scale.

    In less than float64 as a sound kernel has them: products of this dtype, sums in at least float32, weights
    and their gradients rounded before each product, as flash attention does (arXiv:2205.14135, appendix B.2).
    `hidden` says which keys a row may not see, [R, T] or [B, R, T]; the scale is that of the scores.
    """
    wide = torch.promote_types(dtype, torch.float32)

    def narrow(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    q, k, v, dout = (x.to(wide) for x in (q_BRD, k_BTD, v_BTD, dout_BRD))
    scores_BRT = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    probs_BRT = scores_BRT.softmax(dim=-1)
    out_BRD = narrow(narrow(probs_BRT) @ v)
    delta = (dout * out_BRD).sum(dim=-1, keepdim=True)
    dscores_BRT = probs_BRT * (dout @ v.transpose(1, 2) - delta)
    return out_BRD, narrow(narrow(dscores_BRT) @ k * scale)
