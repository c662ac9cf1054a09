"""The cell's whole model on one rank, with plain attention: what a step's loss and gradients should be."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.config import DTYPE_BYTES, LOW_PRECISION, RunConfig
from bench.cost.weights import head_parameters, matrix_parameters
from bench.passes.parity.cut_model import PLAIN_NAME, PlainAttention, plain_attention_installed
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Batch
from bench.training.data import count_valid
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES, build_model

COPIES = 5
"""Of the weights, in float32: themselves, and in float64 (two each) weights and gradients."""
SCORE_COPIES = 6
"""Tensors of a layer's scores in float64 that backward holds at once."""


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far a gradient is from the exact one, both relative to its Euclidean length."""

    distance: float
    """Of all that differs."""
    scale: float
    """Of the part that is parallel to it: rounding has little of it, a wrong factor has nothing else."""
    numbers: int
    """How many the gradient has: what is random in few of them is parallel by chance."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What a step tells the optimizer: the global mean loss, and every gradient by its parameter's name."""

    loss: float
    gradients: Mapping[str, Tensor]

    def loss_error(self, found: Signal) -> float:
        """How far another signal's loss is from this one's, relative."""
        return abs(found.loss - self.loss) / (abs(self.loss) or 1.0)

    def gradient_errors(self, found: Signal) -> dict[str, GradientError]:
        """How far another signal's gradients are from these; infinitely where one is missing."""
        return {name: _error(found.gradients.get(name), exact) for name, exact in self.gradients.items()}


class WholeModel:
    """The model as it is before any step, on this rank alone."""

    def __init__(self, cell: RunConfig, device: torch.device, attention: PlainAttention) -> None:
        model = build_model(
            cell.model,
            attention_name=PLAIN_NAME,
            max_positions=cell.padded_len,
            seed=cell.seed,
            device=device,
        )
        model.gradient_checkpointing_enable({"use_reentrant": False})  # one layer's scores at a time
        self.model = ModelWithLoss(model.train().to(device), cell.loss, StepPhase())
        self.attention = attention
        self.cell = cell
        self.device = device

    def exact(self, sequences: Sequence[Batch]) -> Signal:
        """The signal in float64."""
        return _signal(copy.deepcopy(self.model).double(), sequences, self.attention)

    def rounded(self, sequences: Sequence[Batch]) -> Signal:
        """The signal in the cell's dtype, as mixed precision computes it."""
        dtype = self.cell.dtype
        model = copy.deepcopy(self.model).to(TORCH_DTYPES["fp64" if dtype == "fp64" else "fp32"])
        with torch.autocast(self.device.type, TORCH_DTYPES[dtype], enabled=dtype in LOW_PRECISION):
            return _signal(model, sequences, self.attention)


def needed_bytes(cell: RunConfig, tokens: int) -> int:
    """About what the signals of so many tokens take beside the cell's own model."""
    weights = matrix_parameters(cell.model) + head_parameters(cell.model)  # once more: the embedding
    scores = cell.batch * cell.model.num_heads * tokens**2
    return DTYPE_BYTES["fp32"] * COPIES * weights + DTYPE_BYTES["fp64"] * SCORE_COPIES * scores


@contextmanager
def whole_model(cell: RunConfig, device: torch.device) -> Iterator[WholeModel]:
    """The model, whose plain attention is there while the context lasts."""
    with plain_attention_installed() as attention:
        yield WholeModel(cell, device, attention)


def _signal(model: ModelWithLoss, sequences: Sequence[Batch], attention: PlainAttention) -> Signal:
    """One sequence after another: no more than one is in memory."""
    valid = sum(int(count_valid(batch.labels)) for batch in sequences)
    loss = 0.0
    for batch in sequences:
        attention.documents = batch.documents  # until backward, which computes the layers again
        share = model.loss_of(batch) / max(1, valid)
        share.backward()
        loss += float(share.detach())
    return Signal(loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _error(found: Tensor | None, exact: Tensor) -> GradientError:
    if found is None:
        return GradientError(math.inf, math.inf, exact.numel())
    missed, exact = found.to(exact.device).double() - exact.double(), exact.double()
    square = float(exact.square().sum()) or 1.0
    distance, parallel = float(missed.norm()) / math.sqrt(square), float((missed * exact).sum()) / square
    return GradientError(distance, abs(parallel), exact.numel())
