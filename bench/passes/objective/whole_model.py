"""The cell's whole model on one rank, with plain attention: a step's signal, exact and rounded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.config import DTYPE_BYTES, LOW_PRECISION, RunConfig
from bench.cost.weights import head_parameters, matrix_parameters
from bench.passes.objective.plain_attention import PLAIN_NAME, PlainAttention
from bench.passes.parity.limits import FLOORS
from bench.ranks.log import StepPhase
from bench.strategies.strategy import IGNORED_LABEL, Batch
from bench.training.data import count_valid
from bench.training.embedding import sum_embedding_gradient_in_float32
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES, build_model
from bench.training.trainers.trainer import Trainer

COPIES = 7
"""Of the weights, in float32: themselves, and in float64 (two each) weights, gradients and their sums."""
LOGIT_COPIES = 3
"""Of one sequence's logits in float64: themselves, their softmax and its gradient."""
SCORE_COPIES = 6
"""Tensors of a layer's scores in float64 that backward holds at once."""
CONTROLS = (1, 2, 3)
"""Computations that are equal in exact arithmetic: in how many parts each sums over the keys."""
FACTOR = 4.0
"""A sound step errs at most this many times as much as the controls do, root mean square."""
SCALE_FACTOR = 6.0
"""FACTOR for a gradient's scale. Three controls may show too little of one number by chance."""
CHANCE = 4.0
"""A random deviation has a part along a gradient that n numbers carry: about its own length / sqrt(n)."""
LOSS_BLOCK = 32
"""Rows whose loss is compared on its own: in the mean of all, errors of opposite signs cancel."""


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far a gradient is from the exact one, both relative to the exact one's Euclidean length.

    A gradient that is zero but for rounding (the bias of K nearly is) is measured by the whole model's.
    """

    distance: float
    """Of all that differs."""
    scale: float
    """Of the part that is parallel to it, positive where that is too long. Rounding has little of it, a wrong
    factor has nothing else."""
    numbers: float
    """How many numbers carry the exact gradient, (sum g^2)^2 / sum g^4: few do in the weight of a norm of
    heads. What is random in few numbers is parallel by chance."""
    share: float = 0.0
    """Of the squared length of all gradients together."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What a step tells the optimizer: the global mean loss, and every gradient by its parameter's name."""

    loss: float
    gradients: Mapping[str, Tensor]
    blocks: Tensor | None = None
    """Sums of the losses of `LOSS_BLOCK` rows each; None where only the mean is known."""
    eps: float = 0.0
    """A gradient shorter than so many times the whole one is measured by that: 0 but where it is exact."""

    def loss_error(self, found: Signal) -> float:
        """How far another signal's loss is from this one's, relative."""
        return abs(found.loss - self.loss) / (abs(self.loss) or 1.0)

    def gradient_errors(self, found: Signal) -> dict[str, GradientError]:
        """How far another signal's gradients are from these; infinitely where one is missing."""
        whole = sum(float(each.double().square().sum()) for each in self.gradients.values())
        return {
            name: _error(found.gradients.get(name), exact, whole, self.eps)
            for name, exact in self.gradients.items()
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a sound gradient may be from the exact one."""

    distance: float
    scale: float


@dataclass(frozen=True, slots=True)
class Noise:
    """How far rounded computations are from the exact one, root mean square over the controls."""

    loss: float
    """Of a block of rows, relative to the mean loss."""
    grad_norm: float
    """Of the whole gradient, relative to its length: a sound norm is off by less."""
    scale: float
    """Of one parameter's scale, each weighed by its share of the whole gradient."""
    whole_scale: float
    """Of the whole gradient's scale."""
    gradients: Mapping[str, GradientError]

    def limits(self, name: str, dtype: str, distance: float) -> Limit:
        """Of the gradient of a parameter, one that was found at this distance."""
        plain, floor = self.gradients[name], FLOORS[dtype].backward
        allowed = max(floor, FACTOR * plain.distance)
        by_chance = CHANCE * max(plain.distance, min(distance, allowed)) / math.sqrt(plain.numbers)
        return Limit(allowed, max(floor, by_chance, SCALE_FACTOR * max(plain.scale, self.scale)))

    def whole_limit(self, dtype: str) -> float:
        """Of the whole gradient's scale: parameters that err independently of one another err less together.

        Three controls may all be near zero by chance, so what their parameters' errors come to counts, too.
        """
        independent = math.sqrt(sum((each.share * each.scale) ** 2 for each in self.gradients.values()))
        return max(FLOORS[dtype].backward, SCALE_FACTOR * max(self.whole_scale, independent))

    @classmethod
    def of(cls, exact: Signal, controls: Iterable[Signal]) -> Noise:
        """Controls are compared one by one: no more than one has to be in memory."""
        compared = [(_block_error(exact, each), exact.gradient_errors(each)) for each in controls]
        losses, errors = zip(*compared, strict=True)
        gradients = {
            name: GradientError(
                _rms([each[name].distance for each in errors]),
                _rms([each[name].scale for each in errors]),
                one.numbers,
                one.share,
            )
            for name, one in errors[0].items()
        }
        return cls(
            loss=_rms(losses),
            grad_norm=_rms([_whole(each, "distance") for each in errors]),
            scale=_rms([_whole(each, "scale") for each in errors]),
            whole_scale=_rms([whole_scale(each) for each in errors]),
            gradients=gradients,
        )


Weights = Callable[[Batch], Tensor]
"""By how much each token's loss counts, [B, T]."""


class WholeModel:
    """The model as it is before any step, on this rank alone, and the sequences of the first step."""

    def __init__(
        self, trainer: Trainer, tokens: int, device: torch.device, attention: PlainAttention
    ) -> None:
        cell = trainer.cell
        self.sequences = trainer.data.whole_step(0, tokens)
        model = build_model(
            cell.model, attention_name=PLAIN_NAME, max_positions=cell.seq_len, seed=cell.seed, device=device
        )
        if device.type == "cpu":  # as the cell's
            sum_embedding_gradient_in_float32(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # one layer's scores at a time
        self.model = ModelWithLoss(model.train().to(device), cell.loss, StepPhase())
        self.attention = attention
        self.cell = cell
        self.device = device
        self.phase = trainer.phase
        self.weights_in_dtype = trainer.engine.weights_in_dtype

    def exact(self) -> Signal:
        """The signal in float64, others measured against it in the precision of the cell's dtype."""
        found = self._signal(copy.deepcopy(self.model).double(), None)
        return replace(found, eps=torch.finfo(TORCH_DTYPES[self.cell.dtype]).eps)

    def rounded(self, *, key_parts: int = 1, weights: Weights | None = None) -> Signal:
        """The signal in the cell's dtype: with weights of that dtype, or by autocast from float32."""
        dtype = TORCH_DTYPES[self.cell.dtype]
        narrow = self.cell.dtype in LOW_PRECISION
        wide = torch.float64 if self.cell.dtype == "fp64" else torch.float32
        model = copy.deepcopy(self.model).to(wide)
        if narrow and self.weights_in_dtype:
            for parameter in model.parameters():  # not buffers: engines keep rotary frequencies in float32
                parameter.data = parameter.data.to(dtype)
        self.attention.key_parts = key_parts
        try:
            with torch.autocast(self.device.type, dtype, enabled=narrow and not self.weights_in_dtype):
                return self._signal(model, weights)
        finally:
            self.attention.key_parts = 1

    def _signal(self, model: ModelWithLoss, weights: Weights | None) -> Signal:
        """One sequence after another: no more than one is in memory. Gradients are summed in float32."""
        gradients: dict[str, Tensor] = {}
        blocks: list[Tensor] = []
        weights = weights or _mean_over_tokens(self.sequences)
        for batch in self.sequences:
            self.attention.documents = batch.documents  # until backward, which computes the layers again
            self.phase.enter("forward")  # a large model takes minutes on a CPU: the rank does not hang
            losses = _token_losses(model, batch) * weights(batch)
            self.phase.enter("backward")
            losses.sum().backward()
            blocks += [each.detach().sum(dim=1) for each in losses.split(LOSS_BLOCK, dim=1)]
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    own = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                    gradients[name] = gradients[name] + own if name in gradients else own
            model.zero_grad()
        self.phase.enter(None)
        sums = torch.cat(blocks).double()
        return Signal(float(sums.sum()), gradients, sums)


def needed_bytes(cell: RunConfig, tokens: int) -> int:
    """About what the signals of so many tokens take beside the cell's own model."""
    weights = matrix_parameters(cell.model) + head_parameters(cell.model)  # once more: the embedding
    of_a_sequence = SCORE_COPIES * cell.model.num_heads * tokens**2
    of_a_sequence += LOGIT_COPIES * cell.model.vocab_size * tokens
    return DTYPE_BYTES["fp32"] * COPIES * weights + DTYPE_BYTES["fp64"] * of_a_sequence


def _mean_over_tokens(sequences: Sequence[Batch]) -> Weights:
    """Every valid token of the step weighs the same: the objective."""
    valid = max(1, sum(int(count_valid(batch.labels)) for batch in sequences))
    return lambda batch: torch.full_like(batch.labels, 1 / valid, dtype=torch.float64)


def _token_losses(model: ModelWithLoss, batch: Batch) -> Tensor:
    """Of every token, [B, T], in float32 or float64; 0 where none counts."""
    kept: list[Tensor] = []

    def keep(head: nn.Module, hidden_RH: Tensor, labels_R: Tensor) -> Tensor:
        logits_RV: Any = head(hidden_RH)
        wide = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        kept.append(cross_entropy(wide, labels_R, ignore_index=IGNORED_LABEL, reduction="none"))
        return kept[0].sum()

    model.loss_sum = keep
    model(batch.input_ids, batch.labels, batch.position_ids)
    return kept[0].view_as(batch.labels)


def _block_error(exact: Signal, found: Signal) -> float:
    """The root mean square of a block's error, relative to its part of the loss in the mean."""
    assert exact.blocks is not None
    assert found.blocks is not None
    counted = exact.blocks != 0
    off = (found.blocks - exact.blocks)[counted]
    mean = abs(exact.loss) / max(1, int(counted.sum()))
    return float(off.square().mean().sqrt()) / (mean or 1.0) if off.numel() else 0.0


def _error(found: Tensor | None, exact: Tensor, whole: float, eps: float) -> GradientError:
    if found is None:
        return GradientError(math.inf, math.inf, exact.numel())
    exact = exact.double()
    missed, own = found.to(exact.device).double() - exact, float(exact.square().sum())
    square = max(own, eps**2 * whole) or 1.0
    distance, parallel = float(missed.norm()) / math.sqrt(square), float((missed * exact).sum()) / square
    return GradientError(distance, parallel, _carrying(exact), own / (whole or 1.0))


def _carrying(gradient: Tensor) -> float:
    """How many numbers carry a gradient; all where it is zero."""
    largest = float(gradient.abs().max())
    squares = (gradient / (largest or 1.0)).square()  # of the largest 1: none of them underflows
    return float(squares.sum() ** 2 / squares.square().sum()) if largest else float(gradient.numel())


def whole_scale(errors: Mapping[str, GradientError]) -> float:
    """By how much the gradients are too large as one, relative; nan where one is missing."""
    return sum(each.share * each.scale for each in errors.values())


def _whole(errors: Mapping[str, GradientError], what: str) -> float:
    """The parameters' errors as one, each weighed by its share of the squared gradient."""
    return math.sqrt(sum(each.share * getattr(each, what) ** 2 for each in errors.values()))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(each * each for each in values) / len(values))
