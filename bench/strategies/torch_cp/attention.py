"""torch.distributed's context parallel attention, as it is: its dispatcher for DTensors, its own rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch import library as operators
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    _enable_context_parallel_dispatcher,
    set_rotate_method,
)

from bench.attention.kernels import KERNELS, kernel_backward, kernel_forward
from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.strategies.facts import StrategyFacts
from bench.strategies.strategy import Strategy

SEQUENCE_DIM = 2

Operator = Callable[[DTensor, DTensor, DTensor, bool], DTensor]


def _flash(q_BNSD: DTensor, k_BKSD: DTensor, v_BKSD: DTensor, causal: bool) -> DTensor:
    out: DTensor = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSD, k_BKSD, v_BKSD, 0.0, causal)[0]
    return out


def _cudnn(q_BNSD: DTensor, k_BKSD: DTensor, v_BKSD: DTensor, causal: bool) -> DTensor:
    out: DTensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BNSD, k_BKSD, v_BKSD, None, True, 0.0, causal
    )[0]
    return out


OPERATORS: Mapping[str, Operator] = {"torch_flash": _flash, "cudnn": _cudnn}
"""The operators that torch's ring dispatches on, by the cell's kernel."""


class TorchContextParallel(Strategy):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        self.operator = OPERATORS[cell.kernel]
        self.mesh = DeviceMesh.from_group(groups.sequence, cell.cluster.device)
        if cell.cluster.device == "cpu":
            flash_operator_for_cpu()
        _enable_dispatcher()
        set_rotate_method(cell.option("rotation"))

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        _enable_dispatcher()
        # What torch calls load balancing is the order of the zigzag layout under a causal mask.
        _cp_options.enable_load_balance = causal and self.cell.layout == "zigzag"
        q, k, v = (
            DTensor.from_local(x, self.mesh, [Shard(SEQUENCE_DIM)], run_check=False)
            for x in (q_BNSD, k_BKSD, v_BKSD)
        )
        return self.operator(q, k, v, causal).to_local()


def _enable_dispatcher() -> None:
    """For the rank's whole life: backward runs after `attention` has returned and needs it, too.

    `context_parallel`, which a training stack may use on the same rank, switches it off where it ends.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    if torch.ops.aten._scaled_dot_product_flash_attention.default not in handlers:
        _enable_context_parallel_dispatcher()


@cache
def flash_operator_for_cpu() -> operators.Library:
    """Give torch's flash operator a CPU kernel, which its table of rings asks for and torch does not have.

    The same CPU flash attention that torch uses under another name; K and V heads are repeated for it.
    """
    aten = operators.Library("aten", "IMPL")
    aten.impl("_scaled_dot_product_flash_attention", _cpu_forward, "CPU")
    aten.impl("_scaled_dot_product_flash_attention_backward", _cpu_backward, "CPU")
    return aten


@cache
def flash_in_torch_attention_for_cpu() -> None:
    """Let torch's `scaled_dot_product_attention` take the flash operator for shards, on CPU ranks.

    For them it takes an operator of another name, of which `context_parallel` has no sharding strategy.
    """
    flash_operator_for_cpu()
    plain: Any = torch.nn.functional.scaled_dot_product_attention

    @wraps(plain)  # `context_parallel` puts its own around it by its name
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not isinstance(query, DTensor):
            out: Tensor = plain(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out
        assert attn_mask is None
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        shards: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return shards

    torch.nn.functional.scaled_dot_product_attention = attention


def deal_out_as(layout: str) -> None:
    """Tell `context_parallel` how to deal out its buffers; what it calls load balancing is zigzag."""
    _cp_options.enable_load_balance = layout == "zigzag"


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    return_debug_mask: bool = False,  # noqa: ARG001
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse = kernel_forward(
        KERNELS["torch_flash"], query, key, value, causal=is_causal, scale=scale or query.shape[-1] ** -0.5
    )
    unused = torch.zeros(())  # 0-dim, else DTensor refuses it as an output that is not sharded
    return out, lse.contiguous(), unused, unused, query.shape[2], key.shape[2], unused, unused, unused


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,  # noqa: ARG001
    cum_seq_k: Tensor,  # noqa: ARG001
    max_q: int,  # noqa: ARG001
    max_k: int,  # noqa: ARG001
    dropout_p: float,  # noqa: ARG001
    is_causal: bool,
    philox_seed: Tensor,  # noqa: ARG001
    philox_offset: Tensor,  # noqa: ARG001
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernel_backward(
        KERNELS["torch_flash"], grad_out, query, key, value, out, logsumexp,
        causal=is_causal, scale=scale or query.shape[-1] ** -0.5,
    )  # fmt: skip


STRATEGY = TorchContextParallel
