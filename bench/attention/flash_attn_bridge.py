"""Stand-in for the package flash-attn that computes with any of our kernels.

ring-flash-attn needs only four private functions of flash-attn. yunchang, DeepSpeed's FPDT and ringmaster
(through transformers) also need two public functions and a version. The stand-in has all of these, so that
the packages run unchanged even if flash-attn cannot be installed. With the kernel `flash_attn_2` they use the
installed package. With any other kernel they use the stand-in, even if flash-attn is installed, so that all
strategies of a comparison run on the kernel that the record names.

Shapes: B batch, S query tokens, T key tokens of a sequence, Q and L query and key tokens of all packed
sequences, N query heads, K KV heads, D head size. A causal mask is aligned to the bottom right: queries are
the last tokens.
"""
# ruff: noqa: ARG001  the stand-ins ignore dropout and all parameters that they do not name

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as transformers_flash
from torch import Tensor

from bench.attention.kernels import (
    KERNELS,
    Kernel,
    Packing,
    attend_with_lse,
    kernel_backward_into,
    kernel_forward,
)
from bench.attention.packed import attend_end_to_end, packed_backward, packed_forward

# ring-flash-attn 0.1.8 imports this name from transformers, which removed it in version 5.
_REMOVED_FROM_TRANSFORMERS = "is_flash_attn_greater_or_equal_2_10"
VERSION = "2.8.3"
"""Version that the stand-in reports. Packages choose the parameters that they pass by flash-attn's
version."""
INTERFACE = "flash_attn.flash_attn_interface"
"""Module of flash-attn that defines its functions."""


@cache
def package_on(name: str, kernel: Kernel) -> ModuleType:
    """Import the package or module `name` so that it computes with `kernel`.

    It binds flash-attn's functions when it is imported. It is therefore imported anew for each kernel.
    """
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{name}.")]:
        del sys.modules[loaded]
    with flash_attn_from(kernel):
        return importlib.import_module(name)


@contextmanager
def flash_attn_from(kernel: Kernel) -> Iterator[None]:
    """Make flash-attn compute with `kernel` inside the context, imported directly or through transformers."""
    stand_ins = {} if kernel is KERNELS["flash_attn_2"] else _stand_ins(kernel)
    attributes = _transformers_attributes(stand_ins)
    with _patch(sys.modules, stand_ins), _patch(vars(transformers_flash), attributes):
        yield


@contextmanager
def _patch(target: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Set some keys of a dictionary inside the context, and restore or delete them afterwards."""
    saved = {name: target[name] for name in values if name in target}
    target.update(values)
    try:
        yield
    finally:
        for name in values.keys() - saved.keys():
            del target[name]
        target.update(saved)


def _transformers_attributes(stand_ins: dict[str, ModuleType]) -> dict[str, Any]:
    """Return attributes to set in transformers' flash-attention module, by name.

    They are the removed function, if it is missing, and with stand-ins the loader of flash-attn's functions.
    """
    attributes: dict[str, Any] = {}
    if not hasattr(transformers_flash, _REMOVED_FROM_TRANSFORMERS):
        attributes[_REMOVED_FROM_TRANSFORMERS] = lambda: True
    if stand_ins:
        functions = stand_ins["flash_attn"]
        loaded = functions.flash_attn_func, functions.flash_attn_varlen_func, None, None, None
        attributes["_lazy_imports"] = lambda *_, **__: loaded
    return attributes


@cache
def _stand_ins(kernel: Kernel) -> dict[str, ModuleType]:
    """Return a stand-in for each of flash-attn's two modules, by the module's name."""
    package = ModuleType("flash_attn")
    interface = ModuleType(INTERFACE)
    package.__spec__ = ModuleSpec("flash_attn", loader=None, is_package=True)
    interface.__spec__ = ModuleSpec(INTERFACE, loader=None)
    public = {
        "flash_attn_func": flash_attn_func_on(kernel),
        "flash_attn_varlen_func": flash_attn_varlen_func_on(kernel),
    }
    for function in public.values():
        function.__module__ = INTERFACE  # ringmaster looks for the private functions in this module
    vars(package).update(flash_attn_interface=interface, __version__=VERSION, **public)
    vars(interface).update(
        **public,
        _flash_attn_forward=forward_with(kernel),
        _flash_attn_backward=backward_with(kernel),
        _flash_attn_varlen_forward=varlen_forward_with(kernel),
        _flash_attn_varlen_backward=varlen_backward_with(kernel),
    )
    return {"flash_attn": package, INTERFACE: interface}


def forward_with(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor, None, None]]:
    """Return a stand-in for `_flash_attn_forward` (whole sequences)."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        """Return the output [B, S, N, D], the LSE [B, N, S] and two values that callers ignore."""
        q_BNSD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q, k, v))
        out_BNSD, lse_BNS = kernel_forward(kernel, q_BNSD, k_BKTD, v_BKTD, causal=causal, scale=softmax_scale)
        return out_BNSD.transpose(1, 2), lse_BNS.float(), None, None

    return _flash_attn_forward


def backward_with(kernel: Kernel) -> Callable[..., None]:
    """Return a stand-in for `_flash_attn_backward` (whole sequences)."""

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any,
        **__: Any,
    ) -> None:  # fmt: skip
        """Write the gradients to dq, dk and dv, [B, S, heads, D]."""
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        into = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        kernel_backward_into(kernel, into, *tensors, softmax_lse, causal=causal, scale=softmax_scale)

    return _flash_attn_backward


def varlen_forward_with(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor, None, None]]:
    """Return a stand-in for `_flash_attn_varlen_forward` (packed sequences)."""

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool = False, *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        """Return the output [Q, N, D] and the LSE [N, Q]."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        return *packed_forward(kernel, q, k, v, packing), None, None

    return _flash_attn_varlen_forward


def varlen_backward_with(kernel: Kernel) -> Callable[..., None]:
    """Return a stand-in for `_flash_attn_varlen_backward` (packed sequences)."""

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """Write the gradients to dq [Q, N, D], dk and dv [L, K, D]."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        packed_backward(kernel, (dq, dk, dv), dout, (q, k, v), out, softmax_lse, packing)

    return _flash_attn_varlen_backward


PublicResult = Tensor | tuple[Tensor, Tensor, None]
"""Output; with `return_attn_probs` also the LSE without a gradient, and None in place of probabilities."""


def flash_attn_func_on(kernel: Kernel) -> Callable[..., PublicResult]:
    """Return a stand-in for `flash_attn_func` (whole sequences)."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, *_: Any, return_attn_probs: bool = False, **__: Any,
    ) -> PublicResult:  # fmt: skip
        """Return the output [B, S, N, D], with `return_attn_probs` also the LSE [B, N, S]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if causal and q.shape[1] < k.shape[1]:
            sequences = [_attend_last_queries(kernel, *qkv, scale) for qkv in zip(q, k, v, strict=True)]
            # A batch of one is not copied: its output is already saved for backward.
            out_BSND, lse_BNS = (
                parts[0][None] if len(parts) == 1 else torch.stack(parts)
                for parts in zip(*sequences, strict=True)
            )
        else:
            qkv_BNSD = (x.transpose(1, 2) for x in (q, k, v))
            out_BNSD, lse_BNS = attend_with_lse(*qkv_BNSD, kernel=kernel, causal=causal, scale=scale)
            out_BSND = out_BNSD.transpose(1, 2)
        return (out_BSND, lse_BNS, None) if return_attn_probs else out_BSND

    return flash_attn_func


def flash_attn_varlen_func_on(kernel: Kernel) -> Callable[..., PublicResult]:
    """Return a stand-in for `flash_attn_varlen_func` (packed sequences)."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, *_: Any, return_attn_probs: bool = False, **__: Any,
    ) -> PublicResult:  # fmt: skip
        """Return the output [Q, N, D], with `return_attn_probs` also the LSE [N, Q]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
        out_QND, lse_NQ = attend_end_to_end(q, k, v, kernel=kernel, packing=packing)
        return (out_QND, lse_NQ, None) if return_attn_probs else out_QND

    return flash_attn_varlen_func


def _attend_last_queries(
    kernel: Kernel, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return causal attention of the last S queries of one sequence: the output [S, N, D] and the LSE [N, S].

    Kernels take a causal mask with fewer queries than keys for packed sequences only. A batch is therefore
    computed one sequence at a time.
    """
    queries, keys = len(q_SND), len(k_TKD)
    # The offsets are created on the device, so that the host does not wait for a copy.
    zero_and_one = torch.arange(2, dtype=torch.int32, device=q_SND.device)
    packing = Packing(zero_and_one * queries, zero_and_one * keys, queries, keys, causal=True, scale=scale)
    return attend_end_to_end(q_SND, k_TKD, v_TKD, kernel=kernel, packing=packing)
