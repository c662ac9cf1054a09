"""DistFlashAttn (arXiv:2310.03294), which balances causal attention over ranks with contiguous shards.

While a rank computes, the operand of the next round arrives and the result of the last round is returned. All
ranks start these sends and receives in the same order, so that NCCL can run one after another without a
deadlock.

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
from bench.attention.rotation import PendingSendRecv, start_send_recv
from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.strategies.distflash_attn.facts import Operand, Round, rounds
from bench.strategies.facts import StrategyFacts
from bench.strategies.ring.attention import RingAttention, RingContext

Tensors = tuple[Tensor, ...]
Output = tuple[Tensor, Tensor]
"""Attention's output and its LSE."""
NOTHING = PendingSendRecv((), (), ())
Group = dist.ProcessGroup


class DistFlashAttention(RingAttention):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        self.outputs = SavedOutputs()
        if not facts.recomputes_attention(cell):
            self.checkpoint_contexts = self.outputs.contexts

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        kv_2BKSD, ring = torch.stack([k_BKSD, v_BKSD]), self.ring(causal=causal)
        out: Tensor = _DistFlashAttention.apply(q_BNSD, kv_2BKSD, ring, self.outputs)  # type: ignore[no-untyped-call]
        return out

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return balanced_forward(q_BNSD, torch.stack([k_BKSD, v_BKSD]), self.ring(causal=causal)).lse


class _DistFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingContext, outputs: SavedOutputs) -> Tensor:
        def compute() -> Output:
            partial = balanced_forward(q, kv, ring)
            return partial.out.to(q.dtype), partial.lse

        out, lse = outputs.get_or_compute(compute)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = balanced_backward(dout, q, kv, out, lse, ctx.ring)
        return dq, dkv, None, None


def balanced_forward(q: Tensor, kv: Tensor, ring: RingContext) -> Partial:
    """Return output and LSE of this rank's queries over the keys of all ranks."""
    forward = BalancedForward(q, kv, ring)
    run_rounds(forward, ring)
    return forward.partial


def balanced_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of this rank's kv, in their dtypes."""
    backward = BalancedBackward(dout, q, kv, out, lse, ring)
    run_rounds(backward, ring)
    return backward.dq.to(q.dtype), backward.dkv.to(kv.dtype)


def run_rounds(direction: BalancedForward | BalancedBackward, ring: RingContext) -> None:
    """Run all rounds of a rank; a returned result is added after the block of the next round."""
    group = ring.group
    all_rounds = rounds(group.rank(), group.size(), causal=ring.causal)
    operands = (_start_operands(direction, round_, group) for round_ in all_rounds)
    arriving = next(operands, NOTHING)
    returning: list[tuple[Round, PendingSendRecv]] = []
    direction.compute_local()
    for round_ in all_rounds:
        operand = arriving.wait()
        arriving = next(operands, NOTHING)
        result = () if round_.receives is None else direction.compute(round_.receives, operand)
        returning.append((round_, _start_results(direction, round_, result, group)))
        if len(returning) > 1:
            _add_result(direction, *returning.pop(0))
    for round_, pending in returning:
        _add_result(direction, round_, pending)


def _start_operands(
    direction: BalancedForward | BalancedBackward, round_: Round, group: Group
) -> PendingSendRecv:
    """Start to send and receive the operands of a round."""
    sent, received = (
        () if kind is None else direction.operands[kind] for kind in (round_.sends, round_.receives)
    )
    return start_send_recv(sent, round_.following, received, round_.previous, group)


def _start_results(
    direction: BalancedForward | BalancedBackward, round_: Round, result: Tensors, group: Group
) -> PendingSendRecv:
    """Start to return and receive the results of a round."""
    expected = () if round_.sends is None else direction.result_templates[round_.sends]
    return start_send_recv(result, round_.previous, expected, round_.following, group)


def _add_result(
    direction: BalancedForward | BalancedBackward, round_: Round, pending: PendingSendRecv
) -> None:
    result = pending.wait()
    if round_.sends is not None and result:
        direction.add_result(round_.sends, result)


class BalancedForward:
    """Forward of one call, in which the owner of queries merges outputs and LSE.

    `operands` are the local tensors that the rank may send, whose shapes are the same on all ranks.
    `result_templates` are tensors with the shapes of the returned results.
    """

    partial: Partial

    def __init__(self, q: Tensor, kv: Tensor, ring: RingContext) -> None:
        self.q, self.kv, self.ring = q, kv, ring
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        self.operands: dict[Operand, Tensors] = {Operand.KEYS: (kv,), Operand.QUERIES: (q,)}
        self.result_templates: dict[Operand, Tensors] = {Operand.KEYS: (), Operand.QUERIES: (q, lse)}

    def compute_local(self) -> None:
        """Compute the block of local queries and keys."""
        self.partial = Partial.first(*self._attend(self.q, self.kv, causal=self.ring.causal))

    def compute(self, kind: Operand, operand: Tensors) -> Tensors:
        """Compute a block with a received operand and return the part of the result that its sender owns."""
        (tensor,) = operand
        if kind is Operand.QUERIES:
            return self._attend(tensor, self.kv)
        self.partial.merge(ALL, *self._attend(self.q, tensor))
        return ()

    def add_result(self, kind: Operand, result: Tensors) -> None:  # noqa: ARG002  keys have no result
        """Merge the result that another rank computed from this rank's queries."""
        self.partial.merge(ALL, *result)

    def _attend(self, q: Tensor, kv: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        k, v = kv
        return kernel_forward(self.ring.kernel, q, k, v, causal=causal, scale=q.shape[-1] ** -0.5)


class BalancedBackward:
    """Backward of one call, in which the owner of a tensor sums its gradient in float32 or wider."""

    def __init__(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
    ) -> None:
        self.queries, self.kv, self.ring = (dout, q, out, lse), kv, ring
        self.operands: dict[Operand, Tensors] = {Operand.KEYS: (kv,), Operand.QUERIES: self.queries}
        self.result_templates: dict[Operand, Tensors] = {Operand.KEYS: (kv,), Operand.QUERIES: (q,)}
        self.dq, self.dkv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, kv))

    def compute_local(self) -> None:
        dq, dkv = self._gradients(self.queries, self.kv, causal=self.ring.causal)
        self.dq += dq
        self.dkv += dkv

    def compute(self, kind: Operand, operand: Tensors) -> Tensors:
        if kind is Operand.QUERIES:
            dq, dkv = self._gradients(operand, self.kv)
            self.dkv += dkv
            return (dq,)
        dq, dkv = self._gradients(self.queries, *operand)
        self.dq += dq
        return (dkv,)

    def add_result(self, kind: Operand, result: Tensors) -> None:
        gradient = self.dq if kind is Operand.QUERIES else self.dkv
        gradient += result[0]

    def _gradients(self, queries: Tensors, kv: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        (dout, q, out, lse), (k, v) = queries, kv
        dq, dk, dv = kernel_backward(
            self.ring.kernel, dout, q, k, v, out, lse, causal=causal, scale=q.shape[-1] ** -0.5
        )
        return dq, torch.stack([dk, dv])


class SavedOutputs:
    """Attention outputs of checkpointed layers, which backward reuses when it runs a layer's forward again.

    Attention is thus computed once (arXiv:2310.03294, section 3.3). `torch.utils.checkpoint` enters the
    contexts of the layer that runs, and keeps them alive as long as the layer's graph.
    """

    def __init__(self) -> None:
        self._recorded: list[Output] | None = None
        self._reused: Iterator[Output] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a layer's contexts for `context_fn`, of its first forward and of the repeated one."""
        outputs: list[Output] = []
        return self._record_outputs(outputs), self._reuse_outputs(outputs)

    def get_or_compute(self, compute: Callable[[], Output]) -> Output:
        """Return the output recorded for the same call of this layer, or else of `compute()`."""
        if self._reused is not None:
            return next(self._reused)
        out, lse = compute()
        if self._recorded is not None:
            self._recorded.append((out.detach(), lse))  # detached from the graph of the caller
        return out, lse

    @contextmanager
    def _record_outputs(self, outputs: list[Output]) -> Iterator[None]:
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def _reuse_outputs(self, outputs: list[Output]) -> Iterator[None]:
        self._reused = iter(outputs)
        try:
            yield
        finally:
            self._reused = None


STRATEGY = DistFlashAttention
