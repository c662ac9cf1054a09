"""Errors of the engine's step against float64, their limits, and causes that would explain the errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from bench.config import Cell, OptimizerConfig
from bench.measure.facts import ErrorAndLimit, errors_and_limits, first_beyond, is_within, nearest_to_limit
from bench.measure.objective.coverage import Coverage
from bench.measure.objective.gradient_noise import (
    FACTOR,
    ExactGradient,
    GradientDifference,
    GradientError,
    GradientNoise,
    StepLoss,
    gradient_errors,
    whole_scale,
)
from bench.measure.objective.section import ObjectiveSection
from bench.measure.objective.whole_model import CONTROLS, EXACT, MISTAKEN, WholeModel
from bench.measure.parity.exact import plain_attention_installed
from bench.measure.parity.section import FLOORS
from bench.training.models import TORCH_DTYPES
from bench.training.optimizer import clipped_norm
from bench.training.trainer_facts import NATIVE
from bench.training.trainers.trainer import Trainer

ENGINE = "engine"
"""Key of the errors of the engine's gradients, next to the names of computations."""
NORM_LIMIT = 1e-3
"""Largest relative difference of the norm that the engine reports, and of the norm that the optimizer used,
from the norm of the engine's gradients. In sound steps it was up to 7e-7, because only the order of a sum
differs."""


@dataclass(frozen=True, slots=True)
class ObjectiveStep:
    """Results of the checked step over all ranks."""

    loss: float
    """Global mean loss."""
    gradients: Mapping[str, Tensor]
    """Compared gradients by their parameters' names, in host memory; empty on ranks other than 0."""
    norm: float
    """Norm of all gradients of the engine, compared or not; 0 on ranks other than 0."""
    reported_norm: float
    """Norm before clipping, as the engine reports it."""
    given_norm: float
    """Norm of the gradient from which the optimizer computed its first moment."""
    local_loss_sum: float = 0.0
    """Sum of this rank's token losses."""
    has_right_tokens: bool = True
    """True if the models of all ranks together got each of the step's tokens once."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of the engine's step, and of computations on one rank in the cell's dtype, against float64."""

    cell: Cell
    step: ObjectiveStep
    loss: StepLoss
    """Exact loss."""
    noise: GradientNoise
    """Errors of the controls."""
    gradients: Mapping[str, Mapping[str, GradientError]]
    """Errors of gradients by parameter. The outer key is ENGINE, or the name of a computation in
    `whole_model`."""
    crosses_documents: bool
    """Whether the loss is wrong, and right for attention across the boundaries of packed documents."""

    @classmethod
    def compute(
        cls, step: ObjectiveStep, trainer: Trainer, tokens: int, device: torch.device, coverage: Coverage
    ) -> StepErrors:
        """Compute the step on this rank alone, in float64 and rounded, and return errors against float64."""
        cell = trainer.cell
        differences: defaultdict[str, dict[str, GradientDifference]] = defaultdict(dict)
        with plain_attention_installed() as attention:
            model = WholeModel(trainer, tokens, device, attention)
            for computation, gradients in model.gradients(coverage):
                key = computation
                compared: Mapping[str, Tensor] = gradients
                if computation == EXACT:  # the first computation of each layer
                    exact_gradients = {
                        name: ExactGradient.from_tensor(gradient) for name, gradient in gradients.items()
                    }
                    key, compared = ENGINE, step.gradients
                differences[key] |= {
                    name: exact.difference(compared.get(name)) for name, exact in exact_gradients.items()
                }
            eps = torch.finfo(TORCH_DTYPES[cell.dtype]).eps
            errors = {key: gradient_errors(by_name, eps) for key, by_name in differences.items()}
            loss = model.losses[EXACT]
            block_errors = [loss.block_error(model.losses[name]) for name in CONTROLS]
            noise = GradientNoise.from_controls(block_errors, [errors[name] for name in CONTROLS])
            limit, crosses_documents = loss_limit(noise, cell.dtype), False
            if cell.data.packs and loss.error(step.loss) > limit:
                crosses_documents = model.loss_across_documents().error(step.loss) <= limit
        return cls(cell, step, loss, noise, errors, crosses_documents)

    def fill(self, section: ObjectiveSection, label: str) -> ObjectiveSection:
        """Return the section with errors and limits; `label` names the compared gradients in messages."""
        gradients, noise, dtype = self.gradients[ENGINE], self.noise, self.cell.dtype
        distances = self._distances(gradients)
        scales = {
            name: (abs(error.scale), noise.limits(name, dtype, error.distance).scale)
            for name, error in gradients.items()
        }
        worst_distance, worst_scale = nearest_to_limit(distances), nearest_to_limit(scales)
        norms = norm_errors(self.step, self.cell.optimizer)
        compared = {
            "loss": (self.loss.error(self.step.loss), loss_limit(noise, dtype)),
            f"gradient of {worst_distance}": distances[worst_distance],
            f"scale of the gradient of {worst_scale}": scales[worst_scale],
            f"scale of {label}": (abs(whole_scale(gradients)), noise.whole_limit(dtype)),
            **{name: (error, NORM_LIMIT) for name, error in norms.items()},
        }
        errors, limits = errors_and_limits(compared)
        mistakes, mistake_limits = errors_and_limits(self._mistakes())
        return replace(
            section,
            cause=None if first_beyond(errors, limits) is None else self._cause(label),
            parameters=len(gradients),
            errors=errors,
            limits=limits,
            noise={"loss": noise.loss, "grad_norm": noise.grad_norm},
            gradient_noise=noise.by_kind(),
            mistakes=mistakes,
            mistake_limits=mistake_limits,
        )

    def _distances(self, errors: Mapping[str, GradientError]) -> dict[str, ErrorAndLimit]:
        """Return the distance of each gradient, and its limit."""
        return {
            name: (error.distance, self.noise.limits(name, self.cell.dtype, error.distance).distance)
            for name, error in errors.items()
        }

    def _mistakes(self) -> dict[str, ErrorAndLimit]:
        """Return each known mistake's relative change of the gradient that shows it best, and the limit."""
        degree, dtype, noise = self.cell.sp_degree, self.cell.dtype, self.noise
        if degree == 1:
            return {}
        scale = min(noise.limits(name, dtype, 1 - 1 / degree).scale for name in noise.gradients)
        mistakes = {"gradients divided by sp_degree": (1 - 1 / degree, scale)}
        if MISTAKEN in self.gradients:
            mistakes["a factor of 1 % on all gradients"] = (0.01, noise.whole_limit(dtype))
            distances = self._distances(self.gradients[MISTAKEN])
            mistakes["losses averaged over ranks"] = distances[nearest_to_limit(distances)]
        return mistakes

    def _cause(self, label: str) -> str | None:
        """Return a message about tokens, documents or a factor that explains the errors; None without one."""
        if not self.step.has_right_tokens:
            return "the ranks saw other tokens than the step holds: some were dropped, repeated or misplaced"
        if self.crosses_documents:
            way_out = "" if self.cell.trainer == NATIVE else f"; take trainer={NATIVE} (docs/stacks.md)"
            return f"the loss is that of attention across the boundaries of documents{way_out}"
        degree = self.cell.sp_degree
        for factor, name in ((degree, "sp_degree"), (1 / degree, "1/sp_degree")):
            if factor != 1 and self._is_factor(factor):
                return f"gradients are exactly {name} = {factor:g} times too large"
        common = 1 + whole_scale(self.gradients[ENGINE])
        is_wrong = abs(common - 1) > self.noise.whole_limit(self.cell.dtype)
        if is_wrong and 0 < common < math.inf and self._is_factor(common):
            return f"a factor of {common:.4f} on {label} would explain it"
        return None

    def _is_factor(self, factor: float) -> bool:
        """Return whether all gradients are right after division by the factor."""
        divided = {name: error.divided_by(factor) for name, error in self.gradients[ENGINE].items()}
        return all(is_within(error, limit) for error, limit in self._distances(divided).values())


def loss_limit(noise: GradientNoise, dtype: str) -> float:
    """Return the largest relative error of a sound loss."""
    return max(FLOORS[dtype].loss, FACTOR * noise.loss)


def norm_errors(step: ObjectiveStep, optimizer: OptimizerConfig) -> dict[str, float]:
    """Return the relative errors of two norms, against the norm of the engine's gradients.

    The norm that the optimizer was given is compared with this norm after clipping.
    """
    expected = {
        "gradient norm that the step reports": (step.reported_norm, step.norm),
        "gradient norm that the optimizer was given": (step.given_norm, clipped_norm(step.norm, optimizer)),
    }
    return {name: abs(norm - exact) / (exact or 1.0) for name, (norm, exact) in expected.items()}
