"""Context managers that watch the attention calls of a transformers model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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


class AttentionArguments:
    """Arguments of the attention calls of a step that have gradients enabled.

    Attributes:
        dtype: Coarsest dtype of the first call, in which it computes; under autocast inputs may be wider.
        queries: Number of this rank's queries in the first call; None before it.
        scale: Factor of the scores in the first call; None if it did not pass one.
        features: Features by which a call differs from plain causal attention, in order.
    """

    def __init__(self, dtype: torch.dtype, sequence_ranks: int) -> None:
        self.dtype, self.sequence_ranks = dtype, sequence_ranks
        self.queries: int | None = None
        self.scale: float | None = None
        self.features: dict[str, None] = {}

    @contextmanager
    def record_step(self, attention_name: str) -> Iterator[None]:
        """Record the calls of a step, and forget those of earlier steps."""
        errors = DeferredErrors()
        self.features, self.queries = {}, None

        def run_and_record(run: RunAttention, inputs: Inputs, *call: Any) -> AttentionResult:
            out, weights = run(*inputs)
            with errors:
                if torch.is_grad_enabled():
                    self._record((*inputs, out), *call)
            return out, weights

        with _wrap_attention(attention_name, run_and_record):
            yield
        errors.raise_first()

    def _record(
        self, tensors: Sequence[Tensor], module: nn.Module, mask: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Record one call; `tensors` are q, k, v and the output."""
        if self.queries is None:
            self.dtype = max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)
            self.queries, self.scale = tensors[0].shape[2], arguments.get("scaling")
        window, is_causal = arguments.get("sliding_window"), arguments.get("is_causal")
        features = {
            "it is given a mask": mask is not None,
            "it has dropout": bool(arguments.get("dropout")),
            "it has a sliding window": window is not None and window < self.queries * self.sequence_ranks,
            "it has capped scores": arguments.get("softcap") is not None,
            "it has sinks": arguments.get("s_aux") is not None,
            "it is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
        }
        self.features |= dict.fromkeys(name for name, is_present in features.items() if is_present)


def watch_attention(attention_name: str, watch: AttentionWatch) -> AbstractContextManager[None]:
    """Run every attention call through `watch` while the context lasts."""

    def run_watched(run: RunAttention, inputs: Inputs, *_: Any) -> AttentionResult:
        weights: list[Any] = []

        def attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
            out, call_weights = run(q_BNSD, k_BKSD, v_BKSD)
            weights.append(call_weights)
            return out

        return watch.run(attention, *inputs), weights[-1]

    return _wrap_attention(attention_name, run_watched)


def _wrap_attention(name: str, wrapper: Callable[..., AttentionResult]) -> AbstractContextManager[None]:
    """Route every call of this attention through `wrapper` while the context lasts.

    `wrapper(run, (q, k, v), module, mask, arguments)` returns the call's result; `run` is the original call.
    """
    original: Callable[..., AttentionResult] | None = ALL_ATTENTION_FUNCTIONS.get(name)

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **arguments: Any
    ) -> AttentionResult:
        function = original or sys.modules[type(module).__module__].eager_attention_forward
        return wrapper(
            lambda *inputs: function(module, *inputs, mask, **arguments), (q, k, v), module, mask, arguments
        )

    return register_attention(name, attention)
