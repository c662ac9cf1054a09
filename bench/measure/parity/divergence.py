"""Description of the first tensor that differs from plain attention, and of the mistake that explains it.

Shapes: B sequences, N query heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.measure.facts import is_within
from bench.measure.parity.exact import Tensors, masked_attention, relative_error, scale_of, visible_keys
from bench.strategies.strategy import Strategy

TensorsByName = Mapping[str, Tensor]
FEWEST_NUMBERS = 64
"""Fewest fp16 numbers that may show rounding to bf16. Each is a bf16 number with probability 1/8."""


def first_divergence(
    strategy: Strategy,
    inputs: Tensors,
    results: TensorsByName,
    exact: TensorsByName,
    limits: Mapping[str, float],
    *,
    causal: bool,
    documents: Documents | None,
) -> str | None:
    """Describe the first wrong tensor, or return None if every tensor is within its limit.

    The description has the tensor's name, error and wrong tokens, and the known mistake that would explain
    them. An fp16 tensor that holds numbers of bf16 only is wrong, too.

    `inputs` are q, k, v and the gradient of the output, [B, heads, T, D]. `results` are the strategy's
    tensors in token order and `exact` those of plain attention in float64, by name. `limits` are relative to
    the maximum of the exact tensor.
    """
    for name, limit in limits.items():
        result = results[name]
        if _was_bf16(result):
            return f"{name} is fp16 but holds numbers of bf16 only: three of its bits were rounded away"
        error = relative_error(result, exact[name])
        if is_within(error, limit):
            continue
        if not bool(result.isfinite().all()):
            return f"{name} is not finite {_describe_not_finite(strategy, result)}"
        cause = _describe_wrong_factor(strategy, result, exact[name], limit)
        if cause is None and name == "out":
            mistakes = _mistakes(strategy, inputs, causal, documents)
            fitting = (mistake for mistake, wrong in mistakes if relative_error(result, wrong) <= limit)
            cause = next(fitting, None)
        tokens = _describe_wrong_tokens(result, exact[name], limit)
        return (
            f"{name} is off by {error:.1e} of its maximum (limit {limit:.1e}) at {tokens};"
            f" {cause or 'no known cause fits'}"
        )
    return None


def _was_bf16(result: Tensor) -> bool:
    """Return whether fp16 numbers went through bf16. The error of that may be within the limit."""
    numbers = result[result != 0]
    if result.dtype is not torch.float16 or len(numbers) < FEWEST_NUMBERS:
        return False
    return bool((numbers.bfloat16().half() == numbers).all())


def _describe_wrong_tokens(result: Tensor, exact: Tensor, limit: float) -> str:
    deviation_T = (result.double() - exact).abs().amax(dim=(0, 1, 3)) / scale_of(exact)
    off = torch.nonzero(~(deviation_T <= limit)).flatten()
    return f"{len(off)} of {len(deviation_T)} tokens, {int(off[0])} to {int(off[-1])}"


def _describe_not_finite(strategy: Strategy, result: Tensor) -> str:
    """Describe the first token that is not finite and the rank of the sequence group that holds it."""
    finite_T = result.isfinite().all(dim=3).all(dim=1).all(dim=0)
    token = int(finite_T.logical_not().nonzero()[0])
    return (
        f"at token {token}, which rank {int(_owners(strategy, len(finite_T))[token])} of the sequence holds"
    )


def _describe_wrong_factor(strategy: Strategy, result: Tensor, exact: Tensor, limit: float) -> str | None:
    """Describe the factor sp_degree or 1/sp_degree if the result is right without it, else return None."""
    degree = strategy.cell.sp_degree
    for factor, name in ((degree, "sp_degree"), (1 / degree, "1/sp_degree")):
        if degree > 1 and relative_error(result.double() / factor, exact) <= limit:
            return f"it is exactly {name} = {factor:g} times too large"
    return None


def _mistakes(
    strategy: Strategy, inputs: Tensors, causal: bool, documents: Documents | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield known mistakes, each with the float64 output that this mistake alone would produce."""
    q, k, v = (x.double() for x in inputs[:3])
    make_mask = partial(visible_keys, q.shape[2], device=q.device)
    mask = make_mask(causal=causal, documents=documents)
    if documents is not None:
        across = make_mask(causal=causal)
        yield "attention crosses the boundaries of documents", masked_attention(q, k, v, across)
    if causal:
        allowed = make_mask(causal=False, documents=documents)
        yield (
            "the causal mask is off by one: each token sees its successor",
            masked_attention(q, k, v, allowed.tril(diagonal=1)),
        )
        yield (
            "the causal mask is off by one: no token sees itself",
            masked_attention(q, k, v, allowed.tril(diagonal=-1)),
        )
        yield "the causal mask is missing", masked_attention(q, k, v, allowed)
    if k.shape[1] > 1:
        groups = q.shape[1] // k.shape[1]
        tiled_k, tiled_v = (x.repeat(1, groups, 1, 1) for x in (k, v))
        yield (
            "KV heads are swapped: tiled over the query heads instead of grouped",
            masked_attention(q, tiled_k, tiled_v, mask),
        )
        rolled_k, rolled_v = (x.roll(1, dims=1) for x in (k, v))
        yield "KV heads are swapped: shifted by one", masked_attention(q, rolled_k, rolled_v, mask)
    yield from _ring_mistakes(strategy, q, k, v, mask) if strategy.cell.sp_degree > 1 else ()


def _ring_mistakes(
    strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in the steps of a ring or in merging its partial results, like `_mistakes`."""
    degree = strategy.cell.sp_degree
    owner_T = _owners(strategy, q.shape[2]).to(q.device)
    hops_TT = (owner_T[:, None] - owner_T[None, :]) % degree
    for hop in range(1, degree):
        yield f"ring step {hop} is dropped", masked_attention(q, k, v, mask & (hops_TT != hop))
    yield "every rank attends to its own shard only", masked_attention(q, k, v, mask & (hops_TT == 0))
    partial_outputs = [masked_attention(q, k, v, mask & (hops_TT == hop)) for hop in range(degree)]
    yield (
        "partial outputs are added without rescaling by their LSE",
        torch.stack(partial_outputs).sum(dim=0),
    )


def _owners(strategy: Strategy, tokens: int) -> Tensor:
    """Return the rank in the sequence group that holds each token, [T]."""
    owner_T = torch.empty(tokens, dtype=torch.long)
    for rank in range(strategy.cell.sp_degree):
        for piece in strategy.facts.slices(strategy.cell, tokens, rank):
            owner_T[piece] = rank
    return owner_T
