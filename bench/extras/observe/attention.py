"""Context managers that watch or capture the attention calls of a transformers model.

Letters of shapes: B sequences, N query heads, K KV heads, S tokens of the shard, D the size of a head.
"""

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
from bench.common.deferred_errors import DeferredErrors
from bench.strategies.strategy import register_attention

AttentionResult = tuple[Tensor, Any]
"""Output of an attention function of transformers, and the attention weights or None."""
RunAttention = Callable[[Tensor, Tensor, Tensor], AttentionResult]
"""Function of q [B, N, S, D], k and v [B, K, S, D] that runs one attention call with its other arguments."""
Inputs = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""


@dataclass(slots=True)
class CapturedAttention:
    """One attention call of a step, with the features that make it more than plain causal attention."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """q [B, N, S, D], k, v [B, K, S, D], out [B, S, N, D] or [B, S, N * D]; gradients dq, dk, dv and dout."""
    layer_kinds: dict[str, None] = field(default_factory=dict)
    """Ordered set of features, such as a sliding window, that calls of any layer of the step have."""
    extras: Sequence[str] = ()
    """Features of this call alone: a mask, dropout."""
    scale: float | None = None
    """Factor of the scores; None if the call did not pass one."""

    @property
    def reason_not_comparable(self) -> str | None:
        """Reason why the call cannot be compared with plain causal attention; None if it can."""
        if not self.tensors:
            return "attention was not called with gradients"
        features = [*self.extras, *self.layer_kinds]
        return f"attention was called with {' and '.join(features)}" if features else None


def coarsest_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the coarsest dtype, in which attention computes; under autocast some inputs may be wider."""
    return max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)


def attention_module(attention_name: str) -> str:
    """Return the name of the Python module that defines this attention; transformers' own for `eager`."""
    function = ALL_ATTENTION_FUNCTIONS.get(attention_name)
    return "transformers.models" if function is None else str(function.__module__)


@contextmanager
def watch_attention(attention_name: str, watch: AttentionWatch) -> Iterator[None]:
    """Run every attention call through `watch` while the context lasts."""

    def run_watched(run: RunAttention, inputs: Inputs, *_: Any) -> AttentionResult:
        weights: list[Any] = []

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            out, call_weights = run(q_BNSD, k_BKSD, v_BKSD)
            weights.append(call_weights)
            return out

        return watch.run(attention, *inputs), weights[-1]

    with _wrap_attention(attention_name, run_watched):
        yield


@contextmanager
def report_dtype(attention_name: str, callback: Callable[[torch.dtype], None]) -> Iterator[None]:
    """Call `callback` with the dtype of every attention call that has gradients enabled."""
    errors = DeferredErrors()

    def run_and_report(run: RunAttention, inputs: Inputs, *_: Any) -> AttentionResult:
        out, weights = run(*inputs)
        with errors:
            if torch.is_grad_enabled():
                callback(coarsest_dtype(*inputs, out))
        return out, weights

    with _wrap_attention(attention_name, run_and_report):
        yield
    errors.raise_first()


@contextmanager
def capture_attention(attention_name: str, sequence_ranks: int) -> Iterator[CapturedAttention]:
    """Capture the first attention call whose inputs all require gradients, and these gradients.

    `sequence_ranks` is the number of ranks that share a sequence.
    """
    captured, errors = CapturedAttention(), DeferredErrors()

    def store_gradient(name: str, gradient: Tensor) -> None:
        with errors:
            captured.tensors[name] = gradient.detach()

    def run_and_capture(
        run: RunAttention, inputs: Inputs, module: nn.Module, mask: Any, arguments: Mapping[str, Any]
    ) -> AttentionResult:
        with errors:
            kinds = _layer_kinds(module, arguments, sequence_ranks * inputs[0].shape[2])
            captured.layer_kinds |= dict.fromkeys(kinds)
        if captured.tensors or not all(x.requires_grad for x in inputs):
            return run(*inputs)
        # New views: a gradient hook on a view gets only the gradient that this call returns.
        q, k, v = (x.view_as(x) for x in inputs)
        out, weights = run(q, k, v)
        with errors:
            extras = {"a mask": mask is not None, "dropout": bool(arguments.get("dropout"))}
            captured.extras = [name for name, is_present in extras.items() if is_present]
            captured.scale = arguments.get("scaling")
            for name, tensor in {"q": q, "k": k, "v": v, "out": out}.items():
                captured.tensors[name] = tensor.detach()
                if tensor.requires_grad:
                    tensor.register_hook(partial(store_gradient, f"d{name}"))
        return out, weights

    with _wrap_attention(attention_name, run_and_capture):
        yield captured
    errors.raise_first()


def _layer_kinds(module: nn.Module, arguments: Mapping[str, Any], tokens: int) -> list[str]:
    """Return the features by which a layer differs from plain causal attention over `tokens` tokens."""
    window, is_causal = arguments.get("sliding_window"), arguments.get("is_causal")
    kinds = {
        "a sliding window": window is not None and window < tokens,
        "capped scores": arguments.get("softcap") is not None,
        "attention sinks": arguments.get("s_aux") is not None,
        "full attention": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    return [name for name, is_present in kinds.items() if is_present]


def _wrap_attention(
    attention_name: str, wrapper: Callable[..., AttentionResult]
) -> AbstractContextManager[None]:
    """Route every call of this attention through `wrapper` while the context lasts.

    `wrapper(run, (q, k, v), module, mask, arguments)` returns the call's result; `run` is the original call.
    """
    original: Callable[..., AttentionResult] | None = ALL_ATTENTION_FUNCTIONS.get(attention_name)

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **arguments: Any
    ) -> AttentionResult:
        function = original or sys.modules[type(module).__module__].eager_attention_forward
        return wrapper(
            lambda *inputs: function(module, *inputs, mask, **arguments), (q, k, v), module, mask, arguments
        )

    return register_attention(attention_name, attention)
