"""How far dk and dv of sampled keys are from float64, and how far they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bench.measure.facts import Compared, nearest_to_limit
from bench.measure.full_length.section import KEY_FLOORS, SAMPLED_KEYS, limit_of
from bench.measure.full_length.shards import AttentionSettings, Shards, drawn, hidden_keys
from bench.training.models import TORCH_DTYPES

HALVES = (torch.float16, torch.bfloat16)
GRADIENTS = ("dk", "dv")
BLOCK_SCORES: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**26}
"""Of one block by device: on a CPU what its cache holds, on CUDA a quarter of a GiB in float32."""


def sampled_keys(shards: Shards, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled keys of a sequence: this rank's by its tokens, all ranks' positions, this rank's in these.

    Positions are ascending; every rank that shares the sequence must call it.
    """
    local = drawn_keys(len(shards.positions), -(-SAMPLED_KEYS // shards.ranks), shards.seed)
    held = shards.positions[local]
    is_sampled = torch.zeros(shards.tokens).index_fill(0, held, 1.0)
    positions = shards.summed(is_sampled.to(device)).nonzero()[:, 0]
    return local.to(device), positions, torch.searchsorted(positions, held.to(device))


def drawn_keys(held: int, count: int, seed: int) -> Tensor:
    """Which of a rank's tokens are sampled as keys, its first one always.

    Queries of every rank see that one, in every layout, so that every hop of a ring has a part in it.
    """
    return held - 1 - drawn(held, count, ~seed)


def key_errors(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards
) -> tuple[int, dict[str, Compared]]:
    """How many keys were sampled; error and limit of dk and dv, of the KV head that is worst by its limit."""
    local, positions, own = sampled_keys(shards, x["q"].device)
    parts = zip(*_parts(x, attention, shards, positions), strict=True)
    exact, control, terms = (shards.summed(torch.stack(each, dim=1)) for each in parts)
    sizes = torch.maximum(exact.square().sum(dim=-1), terms)
    found = torch.stack([x[name].transpose(0, 1).index_select(2, local) for name in GRADIENTS])
    plain = control.to(TORCH_DTYPES[attention.dtype])[..., own, :]
    errors = [_relative(each.double() - exact[..., own, :], sizes[..., own]) for each in (found, plain)]
    means = shards.summed(torch.stack(errors, dim=-1)) / sizes[0, 0].numel()
    worst = (_worst(by_head, KEY_FLOORS[attention.dtype]) for by_head in means.sqrt().tolist())
    return len(positions), dict(zip(GRADIENTS, worst, strict=True))


def _parts(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, positions: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """By KV head, what this rank's queries add: exact and as the control has it [2, B, keys, D], terms."""
    dtype = TORCH_DTYPES[attention.dtype]
    # Products of numbers of 24 bits and more need float64: the process may have let float32 ones use TF32.
    wide = torch.float32 if dtype in HALVES else torch.float64
    device = positions.device
    first_keys = None if shards.first_keys is None else shards.first_keys.to(device)
    hidden_SR = hidden_keys(positions, shards.positions.to(device), first_keys, causal=attention.causal)
    shared = x["q"].shape[1] // x["k"].shape[1]
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (shards.whole(x[name][:, head]) for name in ("k", "v"))
        k, v = (whole.index_select(1, positions) for whole in (k_BTD, v_BTD))
        k_BTD = k_BTD.to(wide)
        sums = []
        for query in range(head * shared, (head + 1) * shared):
            q, out, dout = (x[name][:, query] for name in ("q", "out", "dout"))
            lse = log_sum_exp(
                q.to(wide),
                k_BTD,
                shards.positions,
                scale=attention.scale,
                causal=attention.causal,
                first_keys=shards.first_keys,
            )
            given = q, out, dout, lse, k, v, hidden_SR, attention.scale
            sums.append((*key_sums(*given), key_sums(*given, dtype)[0].double()))
        exact, terms, control = (torch.stack(each).sum(dim=0) for each in zip(*sums, strict=True))
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
    """These queries' part of dk and dv of some keys, [2, B, R, D], and its terms' squares, [2, B, R].

    dv = sum_i P_i dO_i and dk = scale sum_i P_i (dP_i - (dO_i . O_i)) Q_i; rounded as `rows` are. The LSE is
    over all keys that a query sees, `hidden` says which of these it does not, [S, R] or [B, S, R].
    """
    wide = torch.promote_types(dtype, torch.float32)
    q, out, dout, lse, k, v = (x.to(wide) for x in (q_BSD, out_BSD, dout_BSD, lse_BS, k_BRD, v_BRD))
    scores_BSR = q @ k.transpose(1, 2) * scale
    probs_BSR = (scores_BSR - lse[..., None]).exp().masked_fill(hidden, 0.0)
    delta = (dout * out).sum(dim=-1, keepdim=True)
    dscores_BSR = probs_BSR * (dout @ v.transpose(1, 2) - delta)
    weights = torch.stack([dscores_BSR, probs_BSR]).to(dtype).to(wide).transpose(2, 3)
    factors = torch.stack([q * scale, dout])
    terms = weights.square() @ factors.square().sum(dim=-1, keepdim=True)
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


def _relative(difference: Tensor, sizes: Tensor) -> Tensor:
    """By gradient and KV head, [2, heads]: squared deviations of its keys, each relative to that key's."""
    return (difference.square().sum(dim=-1) / sizes.where(sizes > 0, 1.0)).sum(dim=(2, 3))


def _worst(by_head: list[tuple[float, float]], floor: float) -> Compared:
    """Return error and limit of the head that is beyond its limit or comes nearest to it."""
    limited = {head: (error, limit_of(floor, control)) for head, (error, control) in enumerate(by_head)}
    return limited[nearest_to_limit(limited)]
