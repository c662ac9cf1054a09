"""The attention of a transformers model, seen and captured from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.watch import AttentionWatch
from bench.kept_errors import KeptErrors

Run = Callable[..., tuple[Tensor, Any]]
Around = Callable[[Run, nn.Module, Tensor, Tensor, Tensor, Any, Mapping[str, Any]], tuple[Tensor, Any]]


@dataclass(slots=True)
class Captured:
    """One call of attention: q, k, v [B, heads, S, D], out [B, S, N, D] or flat, gradients by name.

    `reason` says why the call cannot be compared with plain causal attention.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    """What the layers of all calls are called with that makes them another kind of layer, in order."""
    scale: float | None = None
    reason: str | None = "attention was not called with gradients"


def coarsest(*tensors: Tensor) -> torch.dtype:
    """The dtype that attention computes in: under autocast its inputs may still be wider."""
    return max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)


def module_of(attention_name: str) -> str:
    """The module whose code runs, as Python names it; transformers' own for `eager`."""
    run = ALL_ATTENTION_FUNCTIONS.get(attention_name)
    return "transformers.models" if run is None else str(run.__module__)


@contextmanager
def watched_attention(attention_name: str, watch: AttentionWatch) -> Iterator[None]:
    """Let a watch see every call for as long as the context lasts."""

    def around(
        run: Run, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, named: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        weights: list[Any] = []

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            out, rest = run(module, q_BNSD, k_BKSD, v_BKSD, mask, **named)
            weights.append(rest)
            return out

        return watch.run(attention, q, k, v), weights[-1]

    with _around_attention(attention_name, around):
        yield


@contextmanager
def noted_dtype(attention_name: str, note: Callable[[torch.dtype], None]) -> Iterator[None]:
    """Tell in which dtype attention computes, at every call."""
    errors = KeptErrors()

    def around(
        run: Run, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, named: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        out, weights = run(module, q, k, v, mask, **named)
        with errors:
            if torch.is_grad_enabled():
                note(coarsest(q, k, v, out))
        return out, weights

    with _around_attention(attention_name, around):
        yield
    errors.raise_first()


@contextmanager
def captured_attention(attention_name: str, ranks: int) -> Iterator[Captured]:
    """Capture the first call that trains, with its gradients; one layer's tensors stay alive for it.

    So many ranks share a sequence.
    """
    found, errors = Captured(), KeptErrors()

    def around(
        run: Run, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, named: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        with errors:
            found.kinds |= dict.fromkeys(_other_kind(module, named, ranks * q.shape[2]))
        if found.tensors or not all(x.requires_grad for x in (q, k, v)):
            return run(module, q, k, v, mask, **named)
        # Views of our own: a gradient hook on them sees what this call alone passes back.
        q, k, v = (x.view_as(x) for x in (q, k, v))
        out, weights = run(module, q, k, v, mask, **named)
        with errors:
            found.scale = named.get("scaling")
            found.reason = _not_plain(module, mask, named, ranks * q.shape[2])
            for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
                found.tensors[name] = tensor.detach()
                if tensor.requires_grad:
                    tensor.register_hook(_keep(found, f"d{name}", errors))
        return out, weights

    with _around_attention(attention_name, around):
        yield found
    if found.kinds and found.tensors:
        found.reason = found.reason or f"a layer's attention was called with {' and '.join(found.kinds)}"
    errors.raise_first()


def _keep(found: Captured, name: str, errors: KeptErrors) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        with errors:
            found.tensors[name] = gradient.detach()

    return keep


def _not_plain(module: nn.Module, mask: Any, named: Mapping[str, Any], tokens: int) -> str | None:
    """What makes a call more than causal attention with a scale."""
    extras = {"a mask": mask is not None, "dropout": bool(named.get("dropout"))}
    met = [*(name for name, is_there in extras.items() if is_there), *_other_kind(module, named, tokens)]
    return f"attention was called with {' and '.join(met)}" if met else None


def _other_kind(module: nn.Module, named: Mapping[str, Any], tokens: int) -> list[str]:
    """What of a call belongs to the layer, and makes it no plain causal attention in so many tokens."""
    window = named.get("sliding_window")
    is_causal = named.get("is_causal")
    kinds = {
        "a sliding window": window is not None and window < tokens,
        "capped scores": named.get("softcap") is not None,
        "attention sinks": named.get("s_aux") is not None,
        "full attention": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    return [name for name, is_there in kinds.items() if is_there]


@contextmanager
def _around_attention(attention_name: str, around: Around) -> Iterator[None]:
    """Every model that asks transformers for this attention gets `around` it while the context lasts."""
    table = ALL_ATTENTION_FUNCTIONS
    was_local = attention_name in table._local_mapping
    plain: Run | None = table.get(attention_name)

    def instead(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **named: Any
    ) -> tuple[Tensor, Any]:
        run = plain or sys.modules[type(module).__module__].eager_attention_forward
        return around(run, module, q, k, v, mask, named)

    table[attention_name] = instead
    try:
        yield
    finally:
        if was_local and plain is not None:
            table[attention_name] = plain
        else:
            del table[attention_name]
