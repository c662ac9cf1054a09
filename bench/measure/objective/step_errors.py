"""Errors of the engine's step against float64, their limits, and what alone would explain them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from bench.config import Cell, OptimizerConfig
from bench.measure.facts import Compared, errors_and_limits, first_beyond, is_within, nearest_to_limit
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
from bench.training.trainers.trainer import Trainer

NORM_LIMIT = 1e-3
"""Relative limit of the gradient's norm as the engine reports it and as the optimizer was given it, against
the gradients that the engine shows. Sound steps were off by up to 7e-7: only the order of a sum differs."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks together."""

    loss: float
    """Global mean loss."""
    gradients: Mapping[str, Tensor]
    """Compared gradients by their parameters' names, in host memory; on rank 0 only."""
    norm: float
    """Norm of all gradients that the engine shows, compared or not."""
    reported_norm: float
    """The gradients' norm as the engine says it was before clipping."""
    given_norm: float
    """The norm of what the optimizer made its first moment of."""
    own_losses: float = 0.0
    """The sum of this rank's losses."""
    fed_right: bool = True
    """Whether the ranks' models were given the step's tokens, each once."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of the engine's step, and of the computations that measure what rounding does."""

    cell: Cell
    step: Step
    loss: StepLoss
    """Exact loss."""
    noise: GradientNoise
    gradients: Mapping[str | float, Mapping[str, GradientError]]
    """Errors of the engine's gradients by the factor that divided them, and of each computation's by its
    name."""

    @classmethod
    def of(
        cls, step: Step, trainer: Trainer, tokens: int, device: torch.device, coverage: Coverage
    ) -> StepErrors:
        """Compute the step on this rank alone, exactly and rounded, and compare layer by layer."""
        cell = trainer.cell
        factors = {1.0, float(cell.sp_degree), 1 / cell.sp_degree}
        differences: defaultdict[str | float, dict[str, GradientDifference]] = defaultdict(dict)
        with plain_attention_installed() as attention:
            model = WholeModel(trainer, tokens, device, attention)
            for computation, gradients in model.gradients(coverage):
                compared: dict[str | float, Mapping[str, Tensor]] = {computation: gradients}
                if computation == EXACT:  # the first of each layer
                    exact = {name: ExactGradient.of(each) for name, each in gradients.items()}
                    compared = dict.fromkeys(factors, step.gradients)
                for key, found in compared.items():
                    divisor = key if isinstance(key, float) else 1.0
                    differences[key] |= {
                        name: each.difference(found.get(name), divisor) for name, each in exact.items()
                    }
        eps = torch.finfo(TORCH_DTYPES[cell.dtype]).eps
        errors = {key: gradient_errors(each, eps) for key, each in differences.items()}
        loss = model.losses[EXACT]
        block_errors = [loss.block_error(model.losses[name]) for name in CONTROLS]
        return cls(
            cell, step, loss, GradientNoise.of(block_errors, [errors[name] for name in CONTROLS]), errors
        )

    def section(self, outcome: ObjectiveSection, whole: str) -> ObjectiveSection:
        """Return the outcome with all errors and limits; `whole` names what was compared in a message."""
        found, noise, dtype = self.gradients[1.0], self.noise, self.cell.dtype
        distances = self._distances(1.0)
        scales = {
            name: (abs(error.scale), noise.limits(name, dtype, error.distance).scale)
            for name, error in found.items()
        }
        far, scaled = nearest_to_limit(distances), nearest_to_limit(scales)
        norms = norm_errors(self.step, self.cell.optimizer)
        compared = {
            "loss": (self.loss.error(self.step.loss), max(FLOORS[dtype].loss, FACTOR * noise.loss)),
            f"gradient of {far}": distances[far],
            f"scale of the gradient of {scaled}": scales[scaled],
            f"scale of {whole}": (abs(whole_scale(found)), noise.whole_limit(dtype)),
            **{name: (error, NORM_LIMIT) for name, error in norms.items()},
        }
        errors, limits = errors_and_limits(compared)
        mistakes, mistake_limits = errors_and_limits(self._mistakes())
        return replace(
            outcome,
            cause=None if first_beyond(errors, limits) is None else self._cause(),
            parameters=len(found),
            errors=errors,
            limits=limits,
            noise={"loss": noise.loss, "grad_norm": noise.grad_norm},
            mistakes=mistakes,
            mistake_limits=mistake_limits,
        )

    def _distances(self, key: str | float) -> dict[str, Compared]:
        """Return the distance of each gradient of one computation, and its limit."""
        return {
            name: (error.distance, self.noise.limits(name, self.cell.dtype, error.distance).distance)
            for name, error in self.gradients[key].items()
        }

    def _mistakes(self) -> dict[str, Compared]:
        """Return what known mistakes would change where they show most, and the limit there."""
        degree, dtype, noise = self.cell.sp_degree, self.cell.dtype, self.noise
        if degree == 1:
            return {}
        scale = min(noise.limits(name, dtype, 1 - 1 / degree).scale for name in noise.gradients)
        found = {"gradients divided by sp_degree": (1 - 1 / degree, scale)}
        if MISTAKEN in self.gradients:
            found["a factor of 1 % on all gradients"] = (0.01, noise.whole_limit(dtype))
            distances = self._distances(MISTAKEN)
            found["losses averaged over ranks"] = distances[nearest_to_limit(distances)]
        return found

    def _cause(self) -> str | None:
        """Return tokens that were lost or moved, or the factor that alone makes the gradients wrong."""
        if not self.step.fed_right:
            return "the ranks saw other tokens than the step holds: some were dropped, repeated or misplaced"
        for factor in (key for key in self.gradients if isinstance(key, float) and key != 1.0):
            if all(is_within(*each) for each in self._distances(factor).values()):
                said = "sp_degree" if factor > 1 else "1/sp_degree"
                return f"gradients are exactly {said} = {factor:g} times too large"
        return None


def norm_errors(step: Step, optimizer: OptimizerConfig) -> dict[str, float]:
    """Return how far the norms are from those of the gradients, relative, clipped as they should be."""
    expected = {
        "gradient norm that the step reports": (step.reported_norm, step.norm),
        "gradient norm that the optimizer was given": (step.given_norm, clipped_norm(step.norm, optimizer)),
    }
    return {name: abs(found - exact) / (exact or 1.0) for name, (found, exact) in expected.items()}
