"""One call of attention, held in shards by some ranks, against float64.

Output and query gradient of some tokens are compared with float64, which takes a row of scores each. The
gradients of some keys and values are compared too where all scores are affordable: every query's LSE takes
them. Of all tokens two identities are asked, exact in exact arithmetic, with P the weights and dS the
gradients of the scores:

    sum_j dV_j V_j^T = sum_ij P_ij dO_i V_j^T = sum_i dO_i O_i^T
    sum_j dK_j K_j^T = sum_ij dS_ij Q_i K_j^T = sum_i Q_i dQ_i^T   (the scale is in dK and dQ)

Whatever is wrong in P and dS themselves shows in the sampled rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bench.common.finite import worst
from bench.measure.facts import Compared, errors_and_limits
from bench.measure.full_length.key_errors import key_errors
from bench.measure.full_length.section import (
    GRADIENT_FLOORS,
    IDENTITY_LIMITS,
    OUT_FLOORS,
    SAMPLED_ROWS,
    FullLengthSection,
    limit_of,
    why_no_keys,
)
from bench.measure.full_length.shards import AttentionSettings, Shards, drawn, hidden_keys, rows
from bench.training.models import TORCH_DTYPES


def compare(x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards) -> FullLengthSection:
    """Errors and limits of one call, the same on every rank that shares the sequence.

    `x` are q, k, v, out and their gradients, [B, heads, S, D] of this rank's shard.
    """
    with torch.autocast(x["q"].device.type, enabled=False):  # a loop's own may still be on
        local = drawn(len(shards.positions), -(-SAMPLED_ROWS // shards.ranks), shards.seed)
        of_rows = _row_errors(x, attention, shards, local.to(x["q"].device))
        of_sums = {
            name: (error, IDENTITY_LIMITS[attention.dtype])
            for name, error in _identity_errors(x, shards).items()
        }
        # What a rank has to make for the LSE of its queries, if all have equal parts.
        scores = math.prod(x["q"].shape[:3]) * shards.tokens // (2 if attention.causal else 1)
        reason = why_no_keys(x["q"].device.type, scores)
        keys, of_keys = (0, {}) if reason else key_errors(x, attention, shards)
    of_keys = {f"{name}_keys": each for name, each in of_keys.items()}
    errors, limits = errors_and_limits({**of_rows, **of_sums, **of_keys})
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
) -> dict[str, Compared]:
    """Relative error and limit of all ranks' sampled rows, by tensor."""
    shared = x["q"].shape[1] // x["k"].shape[1]
    positions_R = shards.positions.to(local.device)[local]
    first_keys = None if shards.first_keys is None else shards.first_keys.to(local.device)[:, local]
    keys = torch.arange(shards.tokens, device=local.device)
    hidden = hidden_keys(keys, positions_R, first_keys, causal=attention.causal)
    squares = torch.zeros(2, 3, dtype=torch.float64, device=local.device)  # found, control, exact
    for head in range(x["k"].shape[1]):
        k_BTD, v_BTD = (shards.whole(x[name][:, head]) for name in ("k", "v"))
        for query in range(head * shared, (head + 1) * shared):
            own = {name: x[name][:, query].index_select(1, local) for name in ("q", "out", "dq", "dout")}
            given = own["q"], k_BTD, v_BTD, own["dout"], hidden, attention.scale
            control = rows(*given, TORCH_DTYPES[attention.dtype])
            compared = zip((own["out"], own["dq"]), control, rows(*given), strict=True)
            for which, (found, plain, exact) in enumerate(compared):
                each = (found.double() - exact, plain.double() - exact, exact)
                squares[which] += torch.stack([part.square().sum() for part in each])
    found, control, exact = shards.summed(squares).sqrt().T.tolist()
    floors = {"out": OUT_FLOORS, "dq": GRADIENT_FLOORS}
    errors = {}
    for at, (name, floor) in enumerate(floors.items()):
        size = exact[at] or 1.0
        limit = limit_of(floor.get(attention.dtype, 0.0), control[at] / size)
        errors[name] = found[at] / size, limit
    return errors


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
