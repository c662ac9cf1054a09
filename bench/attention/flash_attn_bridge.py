"""A stand-in for the flash-attn package, on top of any of our kernels.

ring-flash-attn needs four private functions of flash-attn and nothing else; yunchang, DeepSpeed's FPDT and
ringmaster, which asks transformers for them, need two public ones and a version as well. Given them, their
algorithms run unchanged where flash-attn cannot be installed. With the kernel `flash_attn_2` the installed
package is used and there is no bridge. With any other there is one even where flash-attn is installed: the
strategies of a comparison run on one kernel, the one that the record names.

Shapes: B batch, S query tokens, T key tokens of a sequence, Q and L those of all packed sequences, N query
heads, K KV heads, D head size. A causal mask is aligned to the bottom right: queries are the last tokens.
"""
# ruff: noqa: ARG001  dropout is a parameter of flash-attn that is not used here, as are all after those named

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

# ring-flash-attn 0.1.8 asks transformers for a name that is gone since transformers 5.
_GONE_FROM_TRANSFORMERS = "is_flash_attn_greater_or_equal_2_10"
VERSION = "2.8.3"
"""Of flash-attn, whose functions the bridge offers: packages ask for it to know their parameters."""
INTERFACE = "flash_attn.flash_attn_interface"


@cache
def package_on(name: str, kernel: Kernel) -> ModuleType:
    """The package or module `name`, computing with `kernel`.

    It binds flash-attn's functions when it is imported: each kernel has a copy of its own, so that a second
    one in the same process does not run the first.
    """
    for loaded in [loaded for loaded in sys.modules if f"{loaded}.".startswith(f"{name}.")]:
        del sys.modules[loaded]
    with flash_attn_from(kernel):
        return importlib.import_module(name)


@contextmanager
def flash_attn_from(kernel: Kernel) -> Iterator[None]:
    """While the context lasts, who imports flash-attn or asks transformers for it computes with `kernel`."""
    stand_ins = {} if kernel is KERNELS["flash_attn_2"] else _stand_ins(kernel)
    offered = _of_transformers(stand_ins)
    with _replaced(sys.modules, stand_ins), _replaced(vars(transformers_flash), offered):
        yield


@contextmanager
def _replaced(names: dict[str, Any], given: Mapping[str, Any]) -> Iterator[None]:
    """While the context lasts, these names have other values or, where they had none, any."""
    before = {name: names[name] for name in given if name in names}
    names.update(given)
    try:
        yield
    finally:
        for name in given.keys() - before.keys():
            del names[name]
        names.update(before)


def _of_transformers(stand_ins: dict[str, ModuleType]) -> dict[str, Any]:
    """What packages ask transformers for: a name it lacks, and how it loads flash-attn's functions."""
    offered: dict[str, Any] = {}
    if not hasattr(transformers_flash, _GONE_FROM_TRANSFORMERS):
        offered[_GONE_FROM_TRANSFORMERS] = lambda: True
    if stand_ins:
        functions = stand_ins["flash_attn"]
        loaded = functions.flash_attn_func, functions.flash_attn_varlen_func, None, None, None
        offered["_lazy_imports"] = lambda *_, **__: loaded
    return offered


@cache
def _stand_ins(kernel: Kernel) -> dict[str, ModuleType]:
    package = ModuleType("flash_attn")
    interface = ModuleType(INTERFACE)
    package.__spec__ = ModuleSpec("flash_attn", loader=None, is_package=True)
    interface.__spec__ = ModuleSpec(INTERFACE, loader=None)
    public = {
        "flash_attn_func": flash_attn_func_on(kernel),
        "flash_attn_varlen_func": flash_attn_varlen_func_on(kernel),
    }
    for function in public.values():
        function.__module__ = INTERFACE  # ringmaster looks for the private ones where the public ones are
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
    """`_flash_attn_forward` of whole sequences."""

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        """Output [B, S, N, D] and LSE [B, N, S]; the last two of flash-attn's four values are unused."""
        q_BNSD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q, k, v))
        out_BNSD, lse_BNS = kernel_forward(kernel, q_BNSD, k_BKTD, v_BKTD, causal=causal, scale=softmax_scale)
        return out_BNSD.transpose(1, 2), lse_BNS.float(), None, None

    return _flash_attn_forward


def backward_with(kernel: Kernel) -> Callable[..., None]:
    """`_flash_attn_backward` of whole sequences."""

    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, *_: Any,
        **__: Any,
    ) -> None:  # fmt: skip
        """Fills dq, dk and dv in place, [B, S, heads, D]."""
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        into = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
        kernel_backward_into(kernel, into, *tensors, softmax_lse, causal=causal, scale=softmax_scale)

    return _flash_attn_backward


def varlen_forward_with(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor, None, None]]:
    """`_flash_attn_varlen_forward` of packed sequences."""

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool = False, *_: Any,
        **__: Any,
    ) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
        """Output [Q, N, D] and LSE [N, Q]."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        return *packed_forward(kernel, q, k, v, packing), None, None

    return _flash_attn_varlen_forward


def varlen_backward_with(kernel: Kernel) -> Callable[..., None]:
    """`_flash_attn_varlen_backward` of packed sequences."""

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        """Fills dq [Q, N, D], dk and dv [L, K, D] in place."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        packed_backward(kernel, (dq, dk, dv), dout, (q, k, v), out, softmax_lse, packing)

    return _flash_attn_varlen_backward


Attended = Tensor | tuple[Tensor, Tensor, None]
"""The output; where asked for, also the LSE, which has no gradient, and no probabilities."""


def flash_attn_func_on(kernel: Kernel) -> Callable[..., Attended]:
    """`flash_attn_func` of whole sequences."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, *_: Any, return_attn_probs: bool = False, **__: Any,
    ) -> Attended:  # fmt: skip
        """Output [B, S, N, D] and LSE [B, N, S]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if causal and q.shape[1] < k.shape[1]:
            alone = [_last_of_a_sequence(kernel, *qkv, scale) for qkv in zip(q, k, v, strict=True)]
            # One alone without a copy: it is saved for backward already.
            out_BSND, lse_BNS = (
                parts[0][None] if len(parts) == 1 else torch.stack(parts)
                for parts in zip(*alone, strict=True)
            )
        else:
            by_heads = (x.transpose(1, 2) for x in (q, k, v))
            out_BNSD, lse_BNS = attend_with_lse(*by_heads, kernel=kernel, causal=causal, scale=scale)
            out_BSND = out_BNSD.transpose(1, 2)
        return (out_BSND, lse_BNS, None) if return_attn_probs else out_BSND

    return flash_attn_func


def flash_attn_varlen_func_on(kernel: Kernel) -> Callable[..., Attended]:
    """`flash_attn_varlen_func` of packed sequences."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, *_: Any, return_attn_probs: bool = False, **__: Any,
    ) -> Attended:  # fmt: skip
        """Output [Q, N, D] and LSE [N, Q]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
        out_QND, lse_NQ = attend_end_to_end(q, k, v, kernel=kernel, packing=packing)
        return (out_QND, lse_NQ, None) if return_attn_probs else out_QND

    return flash_attn_varlen_func


def _last_of_a_sequence(
    kernel: Kernel, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [S, N, D] and LSE [N, S] of a sequence's last queries; one alone, as no kernel takes more so."""
    queries, keys = len(q_SND), len(k_TKD)
    # On the device: the host waits for nothing.
    begins = torch.arange(2, dtype=torch.int32, device=q_SND.device)
    packing = Packing(begins * queries, begins * keys, queries, keys, causal=True, scale=scale)
    return attend_end_to_end(q_SND, k_TKD, v_TKD, kernel=kernel, packing=packing)
