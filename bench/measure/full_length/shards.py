"""Shards of one attention call, the mask and sampled tokens of a shard, and exact rows of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank's shard of a sequence, and functions that combine the shards of all ranks that share it.

    Every rank of the sequence group must call these functions together.
    """

    positions: Tensor
    """Positions of this rank's tokens, [S] on the CPU."""
    ranks: int
    """Number of ranks that share the sequence."""
    gather: Callable[[Tensor], Tensor]
    """Function that gathers the shards [B, S, D] of all ranks to [B, T, D] in token order."""
    all_reduce: Callable[[Tensor], Tensor]
    """Function that adds up a tensor over all ranks."""
    seed: int
    """Seed for sampling rows and keys; different on every rank."""
    first_keys: Tensor | None = None
    """First key that each of this rank's tokens sees, [B, S] on the CPU; None if it is key 0 for all of
    them."""
    compared: Tensor | None = None
    """Whether the output of each of this rank's tokens is compared, [B, S]; None for outputs with a
    gradient, as others may be padding. Not used without `first_keys`."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole sequence."""
        return len(self.positions) * self.ranks


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Dtype, scale of the scores and mask of an attention call."""

    dtype: str
    scale: float
    causal: bool


def hidden_keys(keys: Tensor, queries: Tensor, first_keys: Tensor | None, *, causal: bool) -> Tensor:
    """Return the mask of keys that a query may not see, [queries, keys]; with documents [B, queries, keys].

    `keys` and `queries` are positions in the sequence.
    """
    hidden = keys > queries[:, None]
    hidden = hidden & causal
    return hidden if first_keys is None else hidden | (keys < first_keys[..., None])


def sample_tokens(tokens: int, count: int, seed: int) -> Tensor:
    """Return the indices of up to `count` sampled tokens of a shard; the last token is always sampled."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(tokens - 1, generator=generator)[: min(tokens, count) - 1]
    return torch.cat([indices, torch.tensor([tokens - 1])])


def attention_rows(
    q_BRD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    dout_BRD: Tensor,
    hidden: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return output and query gradient of R queries of one head, both [B, R, D].

    dq = P * (dP - (dout . out)) K * scale. In a dtype below float64 the results are rounded like those of
    a sound kernel: factors of products have this dtype, sums have at least float32, and weights and their
    gradients are rounded before each product, as in flash attention (arXiv:2205.14135, appendix B.2).
    `hidden` masks the keys that a query may not see, [R, T] or [B, R, T].
    """
    sum_dtype = torch.promote_types(dtype, torch.float32)

    def round_to_dtype(x: Tensor) -> Tensor:
        return x.to(dtype).to(sum_dtype)

    q, k, v, dout = (x.to(sum_dtype) for x in (q_BRD, k_BTD, v_BTD, dout_BRD))
    scores_BRT = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    probs_BRT = scores_BRT.softmax(dim=-1)
    out_BRD = round_to_dtype(round_to_dtype(probs_BRT) @ v)
    delta = (dout * out_BRD).sum(dim=-1, keepdim=True)
    dscores_BRT = probs_BRT * (dout @ v.transpose(1, 2) - delta)
    return out_BRD, round_to_dtype(round_to_dtype(dscores_BRT) @ k * scale)
