"""torch's context parallel attention, unchanged, which torch's dispatcher runs for attention on DTensors."""

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
"""Operators that torch dispatches to its ring, by the cell's kernel."""


class TorchContextParallel(Strategy):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        self.operator = OPERATORS[cell.kernel]
        self.mesh = DeviceMesh.from_group(groups.sequence, cell.cluster.device)
        if cell.cluster.device == "cpu":
            register_cpu_flash_operator()
        _enable_dispatcher()
        set_rotate_method(cell.option("rotation"))

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        _enable_dispatcher()
        # torch's load balancing is the zigzag layout, and applies to causal masks only.
        _cp_options.enable_load_balance = causal and self.cell.layout == "zigzag"
        q, k, v = (
            DTensor.from_local(x, self.mesh, [Shard(SEQUENCE_DIM)], run_check=False)
            for x in (q_BNSD, k_BKSD, v_BKSD)
        )
        return self.operator(q, k, v, causal).to_local()


def _enable_dispatcher() -> None:
    """Enable torch's dispatcher for the rest of the process, as backward runs after `attention` returns.

    A training stack may use `context_parallel` on the same rank, which disables the dispatcher when it exits.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    if torch.ops.aten._scaled_dot_product_flash_attention.default not in handlers:
        _enable_context_parallel_dispatcher()


@cache
def register_cpu_flash_operator() -> operators.Library:
    """Register a CPU implementation of the flash operator that torch's ring calls, as torch has none on CPUs.

    It calls `torch_flash`, which on a CPU is another operator of torch, and repeats KV heads.

    Returns:
        The library that holds the registration; it lasts as long as this object, which is cached.
    """
    aten = operators.Library("aten", "IMPL")
    aten.impl("_scaled_dot_product_flash_attention", _cpu_forward, "CPU")
    aten.impl("_scaled_dot_product_flash_attention_backward", _cpu_backward, "CPU")
    return aten


@cache
def use_flash_operator_in_sdpa_on_cpu() -> None:
    """Make torch's `scaled_dot_product_attention` call the flash operator for DTensors on CPU ranks.

    Without the change it calls another operator, for which `context_parallel` has no rule.
    """
    register_cpu_flash_operator()
    original: Any = torch.nn.functional.scaled_dot_product_attention

    @wraps(original)  # `context_parallel` wraps the function by its name
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
            out: Tensor = original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out
        assert attn_mask is None
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        shards: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return shards

    torch.nn.functional.scaled_dot_product_attention = attention


def set_shard_layout(layout: str) -> None:
    """Make `context_parallel` shard its buffers in this layout; zigzag is torch's load balancing."""
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
    unused = torch.zeros(())  # 0-dim, because DTensor refuses other outputs that are not sharded
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
