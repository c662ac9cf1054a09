"""The log-sum-exp of every query that a rank holds, a block of scores at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bench.passes.full_length.shards import hidden_keys

BLOCK_SCORES: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**26}
"""Of one block by device: on a CPU what its cache holds, on CUDA a quarter of a GiB in float32."""


def log_sum_exp(
    q_BSD: Tensor,
    k_BTD: Tensor,
    positions: Tensor,
    *,
    scale: float,
    causal: bool,
    first_keys: Tensor | None = None,
) -> Tensor:
    """LSE of the scaled scores [B, S], natural logarithm, in the dtype of q and k.

    `positions` [S], on the CPU, are those of the queries, and so are the `first_keys` [B, S] that they see;
    keys are in token order. The scale comes after the product: that of 16-bit numbers held in float32 is then
    exact in TF32 too, whatever the process has set.
    """
    rows = max(1, BLOCK_SCORES[q_BSD.device.type] // (k_BTD.shape[0] * k_BTD.shape[1]))
    firsts = [None] * -(-len(positions) // rows) if first_keys is None else first_keys.split(rows, dim=1)
    blocks = zip(q_BSD.split(rows, dim=1), positions.split(rows), firsts, strict=True)
    return torch.cat([_of_block(q, k_BTD, at, first, scale, causal=causal) for q, at, first in blocks], dim=1)


def _of_block(
    q_BRD: Tensor, k_BTD: Tensor, at: Tensor, first_BR: Tensor | None, scale: float, *, causal: bool
) -> Tensor:
    """Keys that no query of the block may see are left out, and those that all see are not masked."""
    seen_by_one = int(at.max()) + 1 if causal else k_BTD.shape[1]
    seen_by_all = int(at.min()) + 1 if causal else seen_by_one
    start = 0 if first_BR is None else int(first_BR.min())
    scores_BRT = (q_BRD @ k_BTD[:, start:seen_by_one].transpose(1, 2)).mul_(scale)
    if first_BR is None:
        hidden = torch.arange(seen_by_all, seen_by_one) > at[:, None]
        scores_BRT[..., seen_by_all:].masked_fill_(hidden.to(scores_BRT.device), float("-inf"))
    else:
        hidden = hidden_keys(torch.arange(start, seen_by_one), at, first_BR, causal=causal)
        scores_BRT.masked_fill_(hidden.to(scores_BRT.device), float("-inf"))
    # In place: torch.logsumexp keeps copies of the block and takes twice as long on a CPU.
    largest = scores_BRT.amax(dim=-1, keepdim=True)
    return scores_BRT.sub_(largest).exp_().sum(dim=-1).log_() + largest[..., 0]
