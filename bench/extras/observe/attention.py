"""The attention of a transformers model, seen and captured from outside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.watch import AttentionWatch
from bench.common.kept_errors import KeptErrors
from bench.strategies.strategy import attention_replaced

Result = tuple[Tensor, Any]
"""Output, and the weights where there are any."""
Made = Callable[[Tensor, Tensor, Tensor], Result]
"""A call of attention with these q, k and v, [B, heads, S, D], and all else as it was given."""
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Captured:
    """One call of attention: q, k, v [B, heads, S, D], out [B, S, N, D] or flat, gradients by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    """What the layers of all calls are called with that makes them another kind of layer, in order."""
    extras: Sequence[str] = ()
    """What else this call was given that makes it more than causal attention with a scale."""
    scale: float | None = None

    @property
    def reason(self) -> str | None:
        """Why the call cannot be compared with plain causal attention."""
        if not self.tensors:
            return "attention was not called with gradients"
        met = [*self.extras, *self.kinds]
        return f"attention was called with {' and '.join(met)}" if met else None


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

    def around(made: Made, inputs: Inputs, *_: Any) -> Result:
        weights: list[Any] = []

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            out, rest = made(q_BNSD, k_BKSD, v_BKSD)
            weights.append(rest)
            return out

        return watch.run(attention, *inputs), weights[-1]

    with _around_attention(attention_name, around):
        yield


@contextmanager
def noted_dtype(attention_name: str, note: Callable[[torch.dtype], None]) -> Iterator[None]:
    """Tell in which dtype attention computes, at every call."""
    errors = KeptErrors()

    def around(made: Made, inputs: Inputs, *_: Any) -> Result:
        out, weights = made(*inputs)
        with errors:
            if torch.is_grad_enabled():
                note(coarsest(*inputs, out))
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

    def keep(name: str, gradient: Tensor) -> None:
        with errors:
            found.tensors[name] = gradient.detach()

    def around(made: Made, inputs: Inputs, module: nn.Module, mask: Any, named: Mapping[str, Any]) -> Result:
        with errors:
            found.kinds |= dict.fromkeys(_other_kinds(module, named, ranks * inputs[0].shape[2]))
        if found.tensors or not all(x.requires_grad for x in inputs):
            return made(*inputs)
        # Views of our own: a gradient hook on them sees what this call alone passes back.
        q, k, v = (x.view_as(x) for x in inputs)
        out, weights = made(q, k, v)
        with errors:
            extras = {"a mask": mask is not None, "dropout": bool(named.get("dropout"))}
            found.extras = [name for name, is_there in extras.items() if is_there]
            found.scale = named.get("scaling")
            for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
                found.tensors[name] = tensor.detach()
                if tensor.requires_grad:
                    tensor.register_hook(partial(keep, f"d{name}"))
        return out, weights

    with _around_attention(attention_name, around):
        yield found
    errors.raise_first()


def _other_kinds(module: nn.Module, named: Mapping[str, Any], tokens: int) -> list[str]:
    """What of a call belongs to the layer, and makes it no plain causal attention in so many tokens."""
    window, is_causal = named.get("sliding_window"), named.get("is_causal")
    kinds = {
        "a sliding window": window is not None and window < tokens,
        "capped scores": named.get("softcap") is not None,
        "attention sinks": named.get("s_aux") is not None,
        "full attention": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    return [name for name, is_there in kinds.items() if is_there]


def _around_attention(attention_name: str, around: Callable[..., Result]) -> AbstractContextManager[None]:
    """Every model that asks transformers for this attention gets `around` it while the context lasts."""
    plain: Callable[..., Result] | None = ALL_ATTENTION_FUNCTIONS.get(attention_name)

    def instead(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **named: Any) -> Result:
        run = plain or sys.modules[type(module).__module__].eager_attention_forward
        return around(lambda *inputs: run(module, *inputs, mask, **named), (q, k, v), module, mask, named)

    return attention_replaced(attention_name, instead)
