"""What is measured: a workload of ours, or somebody's own training loop."""

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
    """One call of attention alone: its output and gradients, [B, heads, S, D], of this rank's shard."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Subject(ABC):
    """What the passes look at; they ask what it has, not which kind it is."""

    device: torch.device
    attention_name: str
    """The name under which transformers knows the attention."""
    attention_code: str
    """How the names of the Python modules begin that hold the attention's own code."""
    ranks_beside: int = 0
    """How many other ranks are on this rank's GPU."""
    nodes: int = 1
    """How many machines the ranks are on, where that is known."""
    causal: bool = True
    step_period: int = 1
    """After so many steps the same calls come again, as those of a loader that fetches for several steps."""
    strategy: Strategy | None = None
    """The strategy that is installed; None where it is somebody else's code."""
    trainer: Trainer | None = None
    """The training loop of ours; None where nothing is trained, or by somebody else's."""
    network: nn.Module | None = None
    """The model that is trained; None where attention alone is measured."""
    sequence_ranks: int = 1
    """How many ranks share a sequence, this one among them."""
    activation_offload: ActivationOffload | None = None
    """What moves the layers' inputs to host memory; None where they stay."""

    @abstractmethod
    def watched(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Let a watch see every call of attention for as long as the context lasts."""

    @abstractmethod
    def optimizer_spans(self) -> AbstractContextManager[Spans]:
        """When the optimizer is at work while the context lasts."""

    def attention_call(self) -> AttentionCall | None:
        """The last call, where attention alone is measured."""
        return None

    def fed_positions(self) -> Tensor | None:
        """Those that the last step's first micro-step was given, of its first sequence; None without any."""
        return None

    def seen(self) -> AbstractContextManager[Any]:
        """Around a step that nobody times, for what the subject itself wants to know of it."""
        return nullcontext()
