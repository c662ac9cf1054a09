"""DistFlashAttn (arXiv:2310.03294), which balances causal attention over ranks with contiguous shards.

In every round a rank receives an operand (queries, or keys and values) from another rank, computes a block
with it, and may send the result back to that rank. While it computes, the operand of the next round arrives,
and the result of the previous round is on its way back. All ranks start these sends and receives in the same
order, so that NCCL can run one after another without a deadlock.

Shapes: B batch, S tokens of a shard, N query heads, K KV heads, D head size. K and V are sent as one tensor,
[2, B, K, S, D].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
OutputAndLSE = tuple[Tensor, Tensor]
"""Attention's output and its LSE."""
NOTHING_PENDING = PendingSendRecv((), (), ())
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
        def compute() -> OutputAndLSE:
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
    """Return output and LSE of this rank's queries over the keys that the mask leaves them."""
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


def run_rounds(computation: BalancedComputation, ring: RingContext) -> None:
    """Run all rounds of this rank's forward or backward.

    Results for operands that this rank sent in a round are received and added only after the block of the
    next round, so that they arrive while that block is computed.
    """
    group = ring.group
    all_rounds = rounds(group.rank(), group.size(), causal=ring.causal)
    operands = (_start_operands(computation, round_, group) for round_ in all_rounds)
    arriving = next(operands, NOTHING_PENDING)
    pending_results: list[tuple[Round, PendingSendRecv]] = []
    computation.compute_local()
    for round_ in all_rounds:
        operand = arriving.wait()
        arriving = next(operands, NOTHING_PENDING)
        result = () if round_.receives is None else computation.compute(round_.receives, operand)
        pending_results.append((round_, _start_results(computation, round_, result, group)))
        if len(pending_results) > 1:
            _add_result(computation, *pending_results.pop(0))
    for round_, pending in pending_results:
        _add_result(computation, round_, pending)


def _start_operands(computation: BalancedComputation, round_: Round, group: Group) -> PendingSendRecv:
    """Start to send this rank's operand of a round, and to receive another rank's operand of that shape."""
    sent, received_like = (
        () if kind is None else computation.operands[kind] for kind in (round_.sends, round_.receives)
    )
    return start_send_recv(sent, round_.receiver, received_like, round_.sender, group)


def _start_results(
    computation: BalancedComputation, round_: Round, result: Tensors, group: Group
) -> PendingSendRecv:
    """Start to send a result to the operand's sender, and to receive the result of this rank's operand."""
    received_like = () if round_.sends is None else computation.result_templates[round_.sends]
    return start_send_recv(result, round_.sender, received_like, round_.receiver, group)


def _add_result(computation: BalancedComputation, round_: Round, pending: PendingSendRecv) -> None:
    result = pending.wait()  # empty for keys in forward, whose receiver keeps the result
    if round_.sends is not None and result:
        computation.add_result(round_.sends, result)


class BalancedComputation(ABC):
    """Blocks of one call on one rank, in forward or in backward."""

    operands: dict[Operand, Tensors]
    """Local tensors that this rank may send; those that it receives have these shapes, too."""
    result_templates: dict[Operand, Tensors]
    """Tensors with the shapes of the result that another rank sends back for an operand."""

    @abstractmethod
    def compute_local(self) -> None:
        """Compute the block of local queries and keys."""

    @abstractmethod
    def compute(self, kind: Operand, operand: Tensors) -> Tensors:
        """Compute a block with a received operand and return the sender's part of the result.

        This rank's part is added here. The sender of keys has no part in forward, which is then empty.
        """

    @abstractmethod
    def add_result(self, kind: Operand, result: Tensors) -> None:
        """Add the result that another rank computed for this rank's operand."""


class BalancedForward(BalancedComputation):
    """Forward, in which the rank that owns queries merges their outputs and LSEs."""

    partial: Partial

    def __init__(self, q: Tensor, kv: Tensor, ring: RingContext) -> None:
        self.q, self.kv, self.ring = q, kv, ring
        lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        self.operands = {Operand.KEYS: (kv,), Operand.QUERIES: (q,)}
        self.result_templates = {Operand.KEYS: (), Operand.QUERIES: (q, lse)}

    def compute_local(self) -> None:
        self.partial = Partial.first(*self._attend(self.q, self.kv, causal=self.ring.causal))

    def compute(self, kind: Operand, operand: Tensors) -> Tensors:
        (tensor,) = operand
        if kind is Operand.QUERIES:
            return self._attend(tensor, self.kv)
        self.partial.merge(ALL, *self._attend(self.q, tensor))
        return ()

    def add_result(self, kind: Operand, result: Tensors) -> None:  # noqa: ARG002  keys have no result
        self.partial.merge(ALL, *result)

    def _attend(self, q: Tensor, kv: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        k, v = kv
        return kernel_forward(self.ring.kernel, q, k, v, causal=causal, scale=q.shape[-1] ** -0.5)


class BalancedBackward(BalancedComputation):
    """Backward, in which the rank that owns a tensor sums its gradient in float32 or wider."""

    def __init__(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
    ) -> None:
        self.queries, self.kv, self.ring = (dout, q, out, lse), kv, ring
        self.operands = {Operand.KEYS: (kv,), Operand.QUERIES: self.queries}
        self.result_templates = {Operand.KEYS: (kv,), Operand.QUERIES: (q,)}
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
        self._recorded: list[OutputAndLSE] | None = None
        self._reused: Iterator[OutputAndLSE] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return two contexts of a layer: the first forward records outputs, the repeated one reuses them."""
        outputs: list[OutputAndLSE] = []
        return self._record_outputs(outputs), self._reuse_outputs(outputs)

    def get_or_compute(self, compute: Callable[[], OutputAndLSE]) -> OutputAndLSE:
        """Return the recorded output if backward repeats the layer's forward, and `compute()` otherwise.

        A first forward of a checkpointed layer records the computed output.
        """
        if self._reused is not None:
            return next(self._reused)
        out, lse = compute()
        if self._recorded is not None:
            # autograd will attach its graph to `out`; the recorded tensor must not keep that graph alive.
            self._recorded.append((out.detach(), lse))
        return out, lse

    @contextmanager
    def _record_outputs(self, outputs: list[OutputAndLSE]) -> Iterator[None]:
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def _reuse_outputs(self, outputs: list[OutputAndLSE]) -> Iterator[None]:
        self._reused = iter(outputs)
        try:
            yield
        finally:
            self._reused = None


STRATEGY = DistFlashAttention
