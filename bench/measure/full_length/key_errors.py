"""Errors of dk and dv of sampled keys against float64, and their limits.

The control repeats the computation in the dtype of the measured attention call; limits are derived from the
error of the control. Shapes: B sequences, S queries of this rank's
shard, T keys of the sequence, R sampled keys of all ranks, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.measure.facts import ErrorAndLimit, nearest_to_limit
from bench.measure.full_length.section import KEY_FLOORS, SAMPLED_KEYS, error_limit
from bench.measure.full_length.shards import AttentionSettings, Shards, hidden_keys, sample_tokens
from bench.training.models import TORCH_DTYPES

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
GRADIENTS = ("dk", "dv")
BLOCK_SCORES: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**26}
"""Number of scores in a block, by device: they fit in the cache of a CPU, or in 256 MiB of a GPU."""


@dataclass(frozen=True, slots=True)
class SampledKeys:
    """The keys of a sequence whose gradients are compared."""

    positions: Tensor
    """Positions of all ranks' sampled keys, ascending, [R]."""
    shard_indices: Tensor
    """Indices of this rank's sampled keys in its shard."""
    local_rows: Tensor
    """Indices of this rank's sampled keys in `positions`."""


def sample_keys_of_all_ranks(
    shards: Shards, device: torch.device, samples: int = SAMPLED_KEYS
) -> SampledKeys:
    """Return the sampled keys of a sequence; every rank that shares the sequence must call it."""
    local = sample_keys(len(shards.positions), -(-samples // shards.ranks), shards.seed)
    local_positions = shards.positions[local]
    is_sampled = torch.zeros(shards.tokens).index_fill(0, local_positions, 1.0)
    positions = shards.all_reduce(is_sampled.to(device)).nonzero()[:, 0]
    local_rows = torch.searchsorted(positions, local_positions.to(device))
    return SampledKeys(positions, local.to(device), local_rows)


def sample_keys(tokens: int, count: int, seed: int) -> Tensor:
    """Return the indices of up to `count` sampled keys of a shard; the first token is always sampled.

    Queries of every rank see that token in every layout, so that every step of a ring contributes to its
    gradients.
    """
    return tokens - 1 - sample_tokens(tokens, count, ~seed)


def key_errors(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, samples: int = SAMPLED_KEYS
) -> tuple[int, dict[str, ErrorAndLimit]]:
    """Return the number of sampled keys, and the error and limit of `dk` and of `dv`.

    They are those of the KV head whose error is nearest to its limit. Every rank that shares the sequence
    must call it. `x` are the tensors of `comparison.compare`.
    """
    keys = sample_keys_of_all_ranks(shards, x["q"].device, samples)
    sums_by_head = zip(*_local_sums(x, attention, shards, keys.positions), strict=True)
    exact, control, terms = (shards.all_reduce(torch.stack(sums, dim=1)) for sums in sums_by_head)
    sizes = torch.maximum(exact.square().sum(dim=-1), terms)
    result = torch.stack([x[name].transpose(0, 1).index_select(2, keys.shard_indices) for name in GRADIENTS])
    rounded = control.to(TORCH_DTYPES[attention.dtype])[..., keys.local_rows, :]
    errors = [
        _relative_squares(gradient.double() - exact[..., keys.local_rows, :], sizes[..., keys.local_rows])
        for gradient in (result, rounded)
    ]
    means = shards.all_reduce(torch.stack(errors, dim=-1)) / sizes[0, 0].numel()
    worst = (_worst_head(by_head, KEY_FLOORS[attention.dtype]) for by_head in means.sqrt().tolist())
    return len(keys.positions), dict(zip(GRADIENTS, worst, strict=True))


def _local_sums(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, positions: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield three sums over this rank's queries for each KV head: exact, control and terms.

    Exact and control are `dk` and `dv` stacked, [2, B, R, D]. Terms are the sums of squares of everything
    that is added up in exact, [2, B, R].
    """
    dtype = TORCH_DTYPES[attention.dtype]
    # For float32 and float64 inputs, use float64, because the process may let float32 products use TF32.
    lse_dtype = torch.float32 if dtype in SIXTEEN_BIT else torch.float64
    device = positions.device
    first_keys = None if shards.first_keys is None else shards.first_keys.to(device)
    hidden_SR = hidden_keys(positions, shards.positions.to(device), first_keys, causal=attention.causal)
    shared = x["q"].shape[1] // x["k"].shape[1]
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (shards.gather(x[name][:, head]) for name in ("k", "v"))
        k, v = (whole.index_select(1, positions) for whole in (k_BTD, v_BTD))
        k_BTD = k_BTD.to(lse_dtype)
        sums = []
        for query in range(head * shared, (head + 1) * shared):
            q, out, dout = (x[name][:, query] for name in ("q", "out", "dout"))
            lse = log_sum_exp(
                q.to(lse_dtype),
                k_BTD,
                shards.positions,
                scale=attention.scale,
                causal=attention.causal,
                first_keys=shards.first_keys,
            )
            inputs = q, out, dout, lse, k, v, hidden_SR, attention.scale
            sums.append((*key_sums(*inputs), key_sums(*inputs, dtype)[0].double()))
        exact, terms, control = (torch.stack(parts).sum(dim=0) for parts in zip(*sums, strict=True))
        yield exact, control, terms


def key_sums(
    q_BSD: Tensor,
    out_BSD: Tensor,
    dout_BSD: Tensor,
    lse_BS: Tensor,
    k_BRD: Tensor,
    v_BRD: Tensor,
    hidden: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return the contribution of S queries of one head to dk and dv of R keys, and the squares of its terms.

    The contribution is [2, B, R, D], the sum of the squares of its terms is [2, B, R]. P_i dP_i and
    P_i (dO_i . O_i) are two terms: where they nearly cancel, 16-bit kernels that round each are sound.
    dv = sum_i P_i dO_i and dk = scale sum_i P_i (dP_i - (dO_i . O_i)) Q_i, rounded like `attention_rows`.

    `lse_BS` is over all keys that a query sees, and `hidden` masks those of the R keys that it does not see,
    [S, R] or [B, S, R]. `dtype` is the dtype of the products.
    """
    sum_dtype = torch.promote_types(dtype, torch.float32)
    q, out, dout, lse, k, v = (x.to(sum_dtype) for x in (q_BSD, out_BSD, dout_BSD, lse_BS, k_BRD, v_BRD))
    scores_BSR = q @ k.transpose(1, 2) * scale
    probs_BSR = (scores_BSR - lse[..., None]).exp().masked_fill(hidden, 0.0)
    delta, dprobs_BSR = (dout * out).sum(dim=-1, keepdim=True), dout @ v.transpose(1, 2)
    weights = torch.stack([probs_BSR * (dprobs_BSR - delta), probs_BSR])
    weights = weights.to(dtype).to(sum_dtype).transpose(2, 3)
    factors = torch.stack([q * scale, dout])
    sizes = torch.stack([probs_BSR.square() * (dprobs_BSR.square() + delta.square()), probs_BSR.square()])
    terms = sizes.transpose(2, 3) @ factors.square().sum(dim=-1, keepdim=True)
    return weights @ factors, terms[..., 0]


def log_sum_exp(
    q_BSD: Tensor,
    k_BTD: Tensor,
    positions: Tensor,
    *,
    scale: float,
    causal: bool,
    first_keys: Tensor | None = None,
) -> Tensor:
    """Return the LSE of the scaled scores, [B, S], as a natural logarithm in the dtype of q and k.

    The scale is applied after the product. A product of 16-bit numbers in float32 is then exact even if the
    process has enabled TF32.

    Keys are in token order. `positions`, [S], are the positions of the queries, and `first_keys`, [B, S], the
    first key that each query sees, both on the CPU. Without `first_keys` it is key 0.
    """
    rows = max(1, BLOCK_SCORES[q_BSD.device.type] // (k_BTD.shape[0] * k_BTD.shape[1]))
    firsts = [None] * -(-len(positions) // rows) if first_keys is None else first_keys.split(rows, dim=1)
    blocks = zip(q_BSD.split(rows, dim=1), positions.split(rows), firsts, strict=True)
    return torch.cat(
        [_block_lse(q, k_BTD, at, first, scale, causal=causal) for q, at, first in blocks], dim=1
    )


def _block_lse(
    q_BRD: Tensor, k_BTD: Tensor, positions: Tensor, first_BR: Tensor | None, scale: float, *, causal: bool
) -> Tensor:
    """Return the LSE of a block of R queries.

    Scores of keys that no query of the block sees are not computed. Without `first_BR`, keys that all queries
    see are not masked.
    """
    any_end = int(positions.max()) + 1 if causal else k_BTD.shape[1]  # first key that no query sees
    all_end = int(positions.min()) + 1 if causal else any_end  # first key that some query does not see
    start = 0 if first_BR is None else int(first_BR.min())
    scores_BRT = (q_BRD @ k_BTD[:, start:any_end].transpose(1, 2)).mul_(scale)
    if first_BR is None:
        hidden = torch.arange(all_end, any_end) > positions[:, None]
        scores_BRT[..., all_end:].masked_fill_(hidden.to(scores_BRT.device), float("-inf"))
    else:
        hidden = hidden_keys(torch.arange(start, any_end), positions, first_BR, causal=causal)
        scores_BRT.masked_fill_(hidden.to(scores_BRT.device), float("-inf"))
    # Compute in place, because torch.logsumexp keeps copies of the block and takes twice as long on a CPU.
    largest = scores_BRT.amax(dim=-1, keepdim=True)
    return scores_BRT.sub_(largest).exp_().sum(dim=-1).log_() + largest[..., 0]


def _relative_squares(difference: Tensor, sizes: Tensor) -> Tensor:
    """Return the sum over sequences and keys of squared deviations over the key's size, [2, KV heads]."""
    return (difference.square().sum(dim=-1) / sizes.where(sizes > 0, 1.0)).sum(dim=(2, 3))


def _worst_head(by_head: list[tuple[float, float]], floor: float) -> ErrorAndLimit:
    """Return error and limit of the KV head whose error is the largest share of its limit.

    `by_head` has the errors of the result and of the control for each head.
    """
    limited = {head: (error, error_limit(floor, control)) for head, (error, control) in enumerate(by_head)}
    return limited[nearest_to_limit(limited)]
