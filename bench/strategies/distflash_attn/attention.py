"""DistFlashAttn (arXiv:2310.03294): blocks of causal attention are shared out evenly among contiguous shards.

While a rank computes, what is lent for the next round is under way, and what it found for another goes back.
All ranks start these exchanges in one order, in which NCCL can take one after another without a deadlock.

Shapes: B batch, S tokens of a shard, N query heads, K KV heads, D head size. K and V are sent as one tensor,
[2, B, K, S, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.kernels import kernel_backward, kernel_forward
from bench.attention.layouts import ALL
from bench.attention.merge import Partial
from bench.attention.rotation import HandOver, hand_over
from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.strategies.distflash_attn.facts import Lent, Round, rounds
from bench.strategies.facts import StrategyFacts
from bench.strategies.ring.attention import RingAttention, RingContext

Tensors = tuple[Tensor, ...]
Output = tuple[Tensor, Tensor]
"""Attention's output and its LSE."""
NOTHING = HandOver((), (), ())
Group = dist.ProcessGroup


class DistFlashAttention(RingAttention):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        self.kept = KeptOutputs()
        if not facts.recomputes_attention(cell):
            self.checkpoint_contexts = self.kept.contexts

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        kv_2BKSD, ring = torch.stack([k_BKSD, v_BKSD]), self.ring(causal=causal)
        out: Tensor = _DistFlashAttention.apply(q_BNSD, kv_2BKSD, ring, self.kept)  # type: ignore[no-untyped-call]
        return out

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return balanced_forward(q_BNSD, torch.stack([k_BKSD, v_BKSD]), self.ring(causal=causal)).lse


class _DistFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingContext, kept: KeptOutputs) -> Tensor:
        def computed() -> Output:
            partial = balanced_forward(q, kv, ring)
            return partial.out.to(q.dtype), partial.lse

        out, lse = kept.once(computed)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = balanced_backward(dout, q, kv, out, lse, ctx.ring)
        return dq, dkv, None, None


def balanced_forward(q: Tensor, kv: Tensor, ring: RingContext) -> Partial:
    """Output and LSE of this rank's queries over all ranks' keys."""
    forward = Forward(q, kv, ring)
    take_rounds(forward, ring)
    return forward.partial


def balanced_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of this rank's own kv, in their dtypes."""
    backward = Backward(dout, q, kv, out, lse, ring)
    take_rounds(backward, ring)
    return backward.dq.to(q.dtype), backward.dkv.to(kv.dtype)


def take_rounds(direction: Forward | Backward, ring: RingContext) -> None:
    """All rounds of a rank; what comes back from one is taken in after the next one's block."""
    group = ring.group
    todo = rounds(group.rank(), group.size(), causal=ring.causal)
    lending = (_lend(direction, each, group) for each in todo)
    arriving = next(lending, NOTHING)
    returning: list[tuple[Round, HandOver]] = []
    direction.compute_own()
    for each in todo:
        lent = arriving.wait()
        arriving = next(lending, NOTHING)
        found = () if each.takes is None else direction.compute(each.takes, lent)
        returning.append((each, _give_back(direction, each, found, group)))
        if len(returning) > 1:
            _take_back(direction, *returning.pop(0))
    for late in returning:
        _take_back(direction, *late)


def _lend(direction: Forward | Backward, each: Round, group: Group) -> HandOver:
    given, taken = (() if what is None else direction.lent[what] for what in (each.gives, each.takes))
    return hand_over(given, each.following, taken, each.previous, group)


def _give_back(direction: Forward | Backward, each: Round, found: Tensors, group: Group) -> HandOver:
    expected = () if each.gives is None else direction.given_back[each.gives]
    return hand_over(found, each.previous, expected, each.following, group)


def _take_back(direction: Forward | Backward, each: Round, handed: HandOver) -> None:
    found = handed.wait()
    if each.gives is not None and found:
        direction.take_back(each.gives, found)


class Forward:
    """Forward: the rank that owns the queries merges outputs and LSE.

    `lent` are this rank's own tensors, of shapes as every other's; `given_back` have the shapes of what comes
    back for them.
    """

    partial: Partial

    def __init__(self, q: Tensor, kv: Tensor, ring: RingContext) -> None:
        self.q, self.kv, self.ring = q, kv, ring
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        self.lent: dict[Lent, Tensors] = {Lent.KEYS: (kv,), Lent.QUERIES: (q,)}
        self.given_back: dict[Lent, Tensors] = {Lent.KEYS: (), Lent.QUERIES: (q, lse)}

    def compute_own(self) -> None:
        """The block of this rank's queries and keys."""
        self.partial = Partial.first(*self._attend(self.q, self.kv, causal=self.ring.causal))

    def compute(self, what: Lent, lent: Tensors) -> Tensors:
        """Another's queries with one's own keys, or the reverse; what is the other's of the result."""
        (tensor,) = lent
        if what is Lent.QUERIES:
            return self._attend(tensor, self.kv)
        self.partial.merge(ALL, *self._attend(self.q, tensor))
        return ()

    def take_back(self, what: Lent, found: Tensors) -> None:  # noqa: ARG002  of keys nothing comes back
        """Add what another rank found of this rank's."""
        self.partial.merge(ALL, *found)

    def _attend(self, q: Tensor, kv: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        k, v = kv
        return kernel_forward(self.ring.kernel, q, k, v, causal=causal, scale=q.shape[-1] ** -0.5)


class Backward:
    """Backward: the rank that owns a tensor adds up its gradient, in float32 at least."""

    def __init__(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
    ) -> None:
        self.queries, self.kv, self.ring = (dout, q, out, lse), kv, ring
        self.lent: dict[Lent, Tensors] = {Lent.KEYS: (kv,), Lent.QUERIES: self.queries}
        self.given_back: dict[Lent, Tensors] = {Lent.KEYS: (kv,), Lent.QUERIES: (q,)}
        self.dq, self.dkv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, kv))

    def compute_own(self) -> None:
        dq, dkv = self._gradients(self.queries, self.kv, causal=self.ring.causal)
        self.dq += dq
        self.dkv += dkv

    def compute(self, what: Lent, lent: Tensors) -> Tensors:
        if what is Lent.QUERIES:
            dq, dkv = self._gradients(lent, self.kv)
            self.dkv += dkv
            return (dq,)
        dq, dkv = self._gradients(self.queries, *lent)
        self.dq += dq
        return (dkv,)

    def take_back(self, what: Lent, found: Tensors) -> None:
        mine = self.dq if what is Lent.QUERIES else self.dkv
        mine += found[0]

    def _gradients(self, queries: Tensors, kv: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        (dout, q, out, lse), (k, v) = queries, kv
        dq, dk, dv = kernel_backward(
            self.ring.kernel, dout, q, k, v, out, lse, causal=causal, scale=q.shape[-1] ** -0.5
        )
        return dq, torch.stack([dk, dv])


class KeptOutputs:
    """What attention returned in each checkpointed layer, for when the layer runs once more, in backward.

    Attention itself is computed once (arXiv:2310.03294, section 3.3). `torch.utils.checkpoint` says which
    layer that is, and keeps what it needs as long as the layer's graph.
    """

    def __init__(self) -> None:
        self._kept: list[Output] | None = None
        self._again: Iterator[Output] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of one layer, for `context_fn`: what it runs under first, and what when it runs again."""
        kept: list[Output] = []
        return self._keeping(kept), self._finding(kept)

    def once(self, compute: Callable[[], Output]) -> Output:
        """What `compute` returned for the same call of this layer, or returns now."""
        if self._again is not None:
            return next(self._again)
        out, lse = compute()
        if self._kept is not None:
            self._kept.append((out.detach(), lse))  # without the graph that its caller makes it part of
        return out, lse

    @contextmanager
    def _keeping(self, kept: list[Output]) -> Iterator[None]:
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def _finding(self, kept: list[Output]) -> Iterator[None]:
        self._again = iter(kept)
        try:
            yield
        finally:
            self._again = None


STRATEGY = DistFlashAttention
