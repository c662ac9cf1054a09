"""Subject of a measurement: a workload of the harness, or the user's training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.attention.watch import AttentionWatch
from bench.measure.hooks import Spans
from bench.strategies.strategy import Strategy
from bench.training.activation_memory import ActivationOffload
from bench.training.trainers.trainer import Trainer


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Output and gradients of this rank's shard, [B, heads, S, D], from one call of attention alone."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    number: int
    """Number of the call, which decides its inputs."""


class Subject(ABC):
    """Model or attention that is measured. Passes use these attributes and never ask for the class."""

    device: torch.device
    attention_name: str
    """Name of the attention function in transformers' registry."""
    attention_modules: str
    """Prefix of the names of the Python modules that hold the code of the attention."""
    other_ranks_on_gpu: int = 0
    """Number of other ranks on this rank's GPU."""
    nodes: int = 1
    """Number of nodes on which the ranks run; 1 if it is not known."""
    causal: bool = True
    step_period: int = 1
    """Number of steps after which communication repeats; above 1 if a loader fetches for several steps."""
    strategy: Strategy | None = None
    """Installed strategy; None if the attention is user code."""
    trainer: Trainer | None = None
    """Trainer of the harness; None if nothing is trained, or if the user's loop trains."""
    network: nn.Module | None = None
    """Trained model; None if attention alone is measured."""
    sequence_ranks: int = 1
    """Number of ranks that share a sequence, including this rank."""
    spare_bytes: int = 0
    """Bytes of tensors that only the measurement needs, which do not count as memory of the subject."""
    activation_offload: ActivationOffload | None = None
    """Mover of the layers' inputs to host memory; None if they stay on the device."""

    @abstractmethod
    def watch_attention(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Return a context in which every attention call is reported to `watch`."""

    @abstractmethod
    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        """Return a context that yields a list of the spans in which the optimizer runs."""

    def attention_call(self) -> AttentionCall | None:
        """Return the results of the last call if attention alone is measured, else None."""
        return None

    def input_positions(self) -> Tensor | None:
        """Return the positions of the first sequence in the last step's first micro-step; None if unknown.

        They are [S], or [rows, S] if rows of time, height and width differ, as for images.
        """
        return None

    def around_untimed_step(self) -> AbstractContextManager[Any]:
        """Return a context for one step that is not timed.

        A subclass overrides it to record what would disturb timing; the default does nothing.
        """
        return nullcontext()
