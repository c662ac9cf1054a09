"""Comparison of one attention call, whose ranks hold shards of the sequence, with float64.

Output and query gradient of sampled tokens are compared with float64, which takes one row of scores per
token. Gradients of sampled keys and values need the LSE of every query, that is all scores, and are compared
only if these are affordable. Two identities over all tokens are checked as well. They hold in exact
arithmetic, where P are the weights and dS the gradients of the scores:

    sum_j dV_j V_j^T = sum_ij P_ij dO_i V_j^T = sum_i dO_i O_i^T
    sum_j dK_j K_j^T = sum_ij dS_ij Q_i K_j^T = sum_i Q_i dQ_i^T   (the scale is in dK and dQ)

An error in P or dS itself shows in the sampled rows.

The control is the same rows in the dtype of the call; its error is what rounding alone explains. Shapes:
B sequences, S tokens of the shard, T tokens of the sequence, R sampled tokens of the shard, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bench.common.finite import largest_error
from bench.measure.facts import ErrorAndLimit, errors_and_limits
from bench.measure.full_length.key_errors import key_errors
from bench.measure.full_length.section import (
    GRADIENT_FLOORS,
    IDENTITY_LIMITS,
    OUT_FLOORS,
    SAMPLED_ROWS,
    FullLengthSection,
    error_limit,
    why_no_keys,
)
from bench.measure.full_length.shards import (
    AttentionSettings,
    Shards,
    attention_rows,
    hidden_keys,
    sample_tokens,
)
from bench.training.models import TORCH_DTYPES


def compare(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, samples: int = SAMPLED_ROWS
) -> FullLengthSection:
    """Compare one attention call with float64; every rank that shares the sequence must call it.

    Args:
        x: `q`, `k`, `v`, `out` and their gradients `dq`, `dk`, `dv`, `dout`, [B, heads, S, D] of this rank's
            shard.
        attention: Dtype, scale and mask of the call.
        shards: This rank's shard of the sequence.
        samples: Number of tokens whose rows, and of tokens whose keys are compared, over all ranks.

    Returns:
        Errors and limits, equal on all ranks that share the sequence.
    """
    device = x["q"].device
    with torch.autocast(device.type, enabled=False):  # the training loop's autocast may still be on
        local = sample_tokens(len(shards.positions), -(-samples // shards.ranks), shards.seed)
        compared = _row_errors(x, attention, shards, local.to(device))
        for name, error in _identity_errors(x, shards).items():
            compared[name] = error, IDENTITY_LIMITS[attention.dtype]
        # Scores that a rank computes for the LSE of its queries, if all ranks compute equally many.
        scores = math.prod(x["q"].shape[:3]) * shards.tokens // (2 if attention.causal else 1)
        reason = why_no_keys(device.type, scores)
        keys = 0
        if reason is None:
            keys, key_comparison = key_errors(x, attention, shards, samples)
            compared |= {f"{name}_keys": comparison for name, comparison in key_comparison.items()}
    errors, limits = errors_and_limits(compared)
    return FullLengthSection(
        tokens=shards.tokens,
        rows=len(local) * shards.ranks,
        keys=keys,
        keys_reason=reason,
        errors=errors,
        limits=limits,
    )


def _row_errors(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, local: Tensor
) -> dict[str, ErrorAndLimit]:
    """Return error and limit of `out` and `dq` in all ranks' rows; `local` indexes this rank's, [R]."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    positions_R = shards.positions.to(local.device)[local]
    first_keys = None if shards.first_keys is None else shards.first_keys.to(local.device)[:, local]
    keys = torch.arange(shards.tokens, device=local.device)
    hidden = hidden_keys(keys, positions_R, first_keys, causal=attention.causal)
    # One row for out and one for dq: squared lengths of result - exact, control - exact, and exact.
    squares = torch.zeros(2, 3, dtype=torch.float64, device=local.device)
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (shards.gather(x[name][:, head]) for name in ("k", "v"))
        for query in range(head * shared, (head + 1) * shared):
            rows = {name: x[name][:, query].index_select(1, local) for name in ("q", "out", "dq", "dout")}
            inputs = rows["q"], k_BTD, v_BTD, rows["dout"], hidden, attention.scale
            control = attention_rows(*inputs, TORCH_DTYPES[attention.dtype])
            tensors = zip((rows["out"], rows["dq"]), control, attention_rows(*inputs), strict=True)
            for index, (result, rounded, exact) in enumerate(tensors):
                parts = [result.double() - exact, rounded.double() - exact, exact]
                if index == 0 and first_keys is not None:
                    is_compared = rows["dout"].ne(0).any(dim=-1)
                    if shards.compared is not None:
                        is_compared = shards.compared.to(local.device)[:, local]
                    parts = [part * is_compared[..., None] for part in parts]
                squares[index] += torch.stack([part.square().sum() for part in parts])
    lengths = shards.all_reduce(squares).sqrt().tolist()
    floors = {"out": OUT_FLOORS, "dq": GRADIENT_FLOORS}
    errors = {}
    for (name, floor), (deviation, control_deviation, length) in zip(floors.items(), lengths, strict=True):
        size = length or 1.0
        limit = error_limit(floor.get(attention.dtype, 0.0), control_deviation / size)
        errors[name] = deviation / size, limit
    return errors


def _identity_errors(x: Mapping[str, Tensor], shards: Shards) -> dict[str, float]:
    """Return the error of the identity of `dk` and of `dv`, the largest of any KV head.

    It is the difference of the sum over keys and the sum over queries, relative to the size of both sums and
    of their terms.
    """
    shared = x["q"].shape[1] // x["k"].shape[1]
    errors = {}
    for name, keys, queries in (("dk", ("dk", "k"), ("q", "dq")), ("dv", ("dv", "v"), ("dout", "out"))):
        differences = []
        for head in range(x["k"].shape[1]):
            kv_head, query_heads = slice(head, head + 1), slice(head * shared, (head + 1) * shared)
            key_sum, key_terms = _products(x, keys, kv_head)
            query_sum, query_terms = _products(x, queries, query_heads)
            key_sum, query_sum = shards.all_reduce(key_sum), shards.all_reduce(query_sum)
            terms = shards.all_reduce(key_terms + query_terms)
            size = (terms + (key_sum.square().sum() + query_sum.square().sum())).sqrt()
            difference = (key_sum - query_sum).norm()
            differences.append(float(difference / size) if size else float(difference))
        errors[name] = largest_error(differences)
    return errors


def _products(x: Mapping[str, Tensor], names: tuple[str, str], heads: slice) -> tuple[Tensor, Tensor]:
    """Return the sum over local tokens of two tensors' outer products, [D, D], and the sum of all squares."""
    a, b = (x[name][:, heads].double().flatten(0, 2) for name in names)
    return a.T @ b, (a.square().sum(-1) * b.square().sum(-1)).sum()
