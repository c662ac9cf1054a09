"""Where a strategy first leaves plain attention, and which known mistake would do exactly that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.measure.facts import is_within
from bench.measure.parity.exact import Tensors, masked_attention, relative_error, scale_of, visible
from bench.strategies.strategy import Strategy

Named = Mapping[str, Tensor]
ENOUGH = 64
"""Numbers of fp16 that are all numbers of bf16 by chance with probability 8^-64."""


def first_divergence(
    strategy: Strategy,
    inputs: Tensors,
    found: Named,
    exact: Named,
    limits: Mapping[str, float],
    *,
    causal: bool,
    documents: Documents | None,
) -> str | None:
    """The first tensor beyond its limit, its tokens and the cause that explains it; None when all fit."""
    for name, limit in limits.items():
        if _was_bf16(found[name]):
            return f"{name} is fp16 but holds numbers of bf16 only: three of its bits were rounded away"
        error = relative_error(found[name], exact[name])
        if not is_within(error, limit):
            cause = _factor(strategy, found[name], exact[name], limit)
            if cause is None and name == "out":
                mistakes = _mistakes(strategy, inputs, causal, documents)
                fits = (said for said, wrong in mistakes if relative_error(found[name], wrong) <= limit)
                cause = next(fits, None)
            tokens = _tokens(found[name], exact[name], limit)
            if not bool(found[name].isfinite().all()):
                return f"{name} is not finite {_place(strategy, found[name])}"
            said = f"{name} is off by {error:.1e} of its maximum (limit {limit:.1e}) at {tokens}"
            return f"{said}; {cause or 'no known cause fits'}"
    return None


def _was_bf16(found: Tensor) -> bool:
    """Whether fp16 numbers went through bf16, which an error within the limit may hide."""
    numbers = found[found != 0]
    if found.dtype is not torch.float16 or len(numbers) < ENOUGH:
        return False
    return bool((numbers.bfloat16().half() == numbers).all())


def _tokens(found: Tensor, exact: Tensor, limit: float) -> str:
    deviation_T = (found.double() - exact).abs().amax(dim=(0, 1, 3)) / scale_of(exact)
    off = torch.nonzero(~(deviation_T <= limit)).flatten()
    return f"{len(off)} of {len(deviation_T)} tokens, {int(off[0])} to {int(off[-1])}"


def _place(strategy: Strategy, found: Tensor) -> str:
    """The first token that is not finite, and the rank of its sequence that holds it."""
    finite_T = found.isfinite().all(dim=3).all(dim=1).all(dim=0)
    token = int(finite_T.logical_not().nonzero()[0])
    return (
        f"at token {token}, which rank {int(_owners(strategy, len(finite_T))[token])} of the sequence holds"
    )


def _factor(strategy: Strategy, found: Tensor, exact: Tensor, limit: float) -> str | None:
    """A result that is right up to sp_degree or its inverse."""
    degree = strategy.cell.sp_degree
    for factor, said in ((degree, "sp_degree"), (1 / degree, "1/sp_degree")):
        if degree > 1 and relative_error(found.double() / factor, exact) <= limit:
            return f"it is exactly {said} = {factor:g} times too large"
    return None


def _mistakes(
    strategy: Strategy, inputs: Tensors, causal: bool, documents: Documents | None
) -> Iterator[tuple[str, Tensor]]:
    """Known mistakes, each with the float64 output that it alone would make."""
    q, k, v = (x.double() for x in inputs[:3])
    degree, seen = strategy.cell.sp_degree, partial(visible, q.shape[2], device=q.device)
    mask = seen(causal=causal, documents=documents)
    if documents is not None:
        yield "attention crosses the boundaries of documents", masked_attention(q, k, v, seen(causal=causal))
    if causal:
        allowed = seen(causal=False, documents=documents)
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
    yield from _ring_mistakes(strategy, q, k, v, mask) if degree > 1 else ()


def _ring_mistakes(
    strategy: Strategy, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Iterator[tuple[str, Tensor]]:
    degree = strategy.cell.sp_degree
    owner_T = _owners(strategy, q.shape[2]).to(q.device)
    hops_TT = (owner_T[:, None] - owner_T[None, :]) % degree
    for hop in range(1, degree):
        yield f"ring step {hop} is dropped", masked_attention(q, k, v, mask & (hops_TT != hop))
    yield "every rank attends to its own shard only", masked_attention(q, k, v, mask & (hops_TT == 0))
    blocks = torch.stack([masked_attention(q, k, v, mask & (hops_TT == hop)) for hop in range(degree)]).sum(
        dim=0
    )
    yield "partial outputs are added without rescaling by their LSE", blocks


def _owners(strategy: Strategy, tokens: int) -> Tensor:
    """The group rank that holds each token."""
    owner_T = torch.empty(tokens, dtype=torch.long)
    for rank in range(strategy.cell.sp_degree):
        for piece in strategy.facts.slices(strategy.cell, tokens, rank):
            owner_T[piece] = rank
    return owner_T
