"""One step of the cell's own trainer and engine, and what it should have been.

What the step may differ by follows from controls: the same step on one device in the cell's dtype, with sums
in other orders. Where memory has no room for all gradients, those of three layers are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.labels import size_label
from bench.config import LOW_PRECISION, OptimizerConfig, RunConfig
from bench.measure.losses.rank import all_fed, expected_digest
from bench.measure.objective.coverage import Coverage, coverages, gradient_bytes, needed_bytes
from bench.measure.objective.noise import (
    FACTOR,
    Difference,
    ExactGradient,
    GradientError,
    Noise,
    StepLoss,
    gradient_errors,
    whole_scale,
)
from bench.measure.objective.plain_attention import plain_attention_installed
from bench.measure.objective.section import Objective, objective_tokens
from bench.measure.objective.whole_model import CONTROLS, EXACT, MISTAKEN, Weights, WholeModel
from bench.measure.parity.section import FLOORS
from bench.measure.rank_pass import RankPass
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import Batch, Strategy
from bench.training.data import count_valid, open_data
from bench.training.engines import Engine
from bench.training.models import TORCH_DTYPES
from bench.training.optimizer import OPTIMIZERS, clipped_norm
from bench.training.trainers.trainer import Trainer

CPU_ROOM_BYTES = 4 * 2**30
Compared = tuple[float, float]
"""An error and its limit."""
UNCOUNTED_SHARE = 3
"""One label in so many does not count."""
NORM_LIMIT = 1e-3
"""Of the gradient's norm as the engine reports it and as the optimizer was given it, against the gradients
that the engine shows. Sound steps were off by up to 7e-7: only the order of a sum differs."""


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


class ObjectivePass(RankPass):
    found: Objective | None = None

    def before_steps(self) -> None:
        trainer, device = self.measurement.subject.trainer, self.measurement.subject.device
        if trainer is None:
            return
        with self.measurement.log.during("objective"):
            cell = trainer.cell
            tokens = objective_tokens(cell.padded_len, trainer.strategy.facts.length_multiple(cell))
            choices = [*coverages(cell)]
            chosen = self.agreed(_first_that_fits(cell, tokens, choices, device))
            needed = size_label(needed_bytes(cell, tokens, choices[0]))
            kept = size_label(gradient_bytes(cell, choices[0]))
            because = f"all gradients would take about {needed} on one rank and {kept} in its host memory"
            if chosen == len(choices):
                self.found = Objective(tokens=tokens, sequences=cell.sequences_per_step, reason=because)
                # The same step, and nothing compared: cells of one work train alike, whatever room they have.
                _on_uncounted_labels(trainer, tokens, device).step(0, tokens)
                return
            self.found, coverage = check(trainer, tokens, device, choices[chosen]), choices[chosen]
            if not coverage.is_whole:
                self.found = replace(self.found, noise={}, compared=str(coverage), left_out_because=because)

    def part(self) -> Objective | None:
        return self.found


def check(trainer: Trainer, tokens: int, device: torch.device, coverage: Coverage) -> Objective:
    """Take one short step, before any other; every rank must call it, and rank 0 compares."""
    checked = _on_uncounted_labels(trainer, tokens, device)
    found = _step(checked, tokens, coverage)
    lost = [] if math.isfinite(found.own_losses) else [dist.get_rank()]
    outcome = Objective(tokens=tokens, sequences=trainer.cell.sequences_per_step, lost_on=lost)
    if dist.get_rank() == 0:
        with without_memory_limit():
            outcome = _compared(outcome, found, checked, device, coverage)
    dist.barrier()
    return outcome


def _on_uncounted_labels(trainer: Trainer, tokens: int, device: torch.device) -> Trainer:
    """The same training loop on data of which a third of the labels does not count."""
    own_tokens = min(tokens, trainer.cell.seq_len)
    cell, uncounted = _checked_cell(trainer.cell, own_tokens), own_tokens // UNCOUNTED_SHARE
    return replace(trainer, data=open_data(cell, device, uncounted_tokens=uncounted))


def _first_that_fits(cell: RunConfig, tokens: int, choices: Sequence[Coverage], device: torch.device) -> int:
    """Return the index of the first choice for which memory has room; their number if it has for none.

    On a GPU half of what is free may be taken, on it and of the host, because the steps are still to come.
    """
    for index, coverage in enumerate(choices):
        needed, kept = needed_bytes(cell, tokens, coverage), gradient_bytes(cell, coverage)
        if device.type == "cuda":
            fits = needed <= torch.cuda.mem_get_info(device)[0] // 2
            fits = fits and kept <= psutil.virtual_memory().available // 2
        else:
            fits = needed + kept <= CPU_ROOM_BYTES
        if fits:
            return index
    return len(choices)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of the engine's step and of the computations that measure what rounding does."""

    loss: StepLoss
    """Exact loss."""
    noise: Noise
    found: Mapping[str, GradientError]
    """Errors of the engine's gradients."""
    divided: Mapping[float, Mapping[str, GradientError]]
    """Errors of the engine's gradients after division by a factor."""
    mistaken: Mapping[str, GradientError]
    """Errors of losses averaged over ranks; empty where rounding hides nothing."""


def _comparison(
    step: Step, trainer: Trainer, tokens: int, device: torch.device, coverage: Coverage
) -> Comparison:
    cell = trainer.cell
    factors = {1.0, float(cell.sp_degree), 1 / cell.sp_degree}
    differences: defaultdict[str | float, dict[str, Difference]] = defaultdict(dict)
    exact: dict[str, ExactGradient] = {}
    with plain_attention_installed() as attention:
        model = WholeModel(trainer, tokens, device, attention)
        if cell.sp_degree > 1 and cell.dtype in LOW_PRECISION:  # in others rounding hides nothing
            model.add_mistake(trainer, mean_of_ranks(trainer.strategy, model.sequences))
        for computation, gradients in model.gradients(coverage):
            if computation == EXACT:
                exact = {name: ExactGradient.of(each) for name, each in gradients.items()}
                for factor in factors:
                    own = {
                        name: each.difference(step.gradients.get(name), factor)
                        for name, each in exact.items()
                    }
                    differences[factor] |= own
            else:
                differences[computation] |= {
                    name: each.difference(gradients[name]) for name, each in exact.items()
                }
    eps = torch.finfo(TORCH_DTYPES[cell.dtype]).eps
    errors = {key: gradient_errors(each, eps) for key, each in differences.items()}
    losses = model.losses
    return Comparison(
        loss=losses[EXACT],
        noise=Noise.of(
            [losses[EXACT].block_error(losses[name]) for name in CONTROLS],
            [errors[name] for name in CONTROLS],
        ),
        found=errors[1.0],
        divided={factor: errors[factor] for factor in factors - {1.0}},
        mistaken=errors.get(MISTAKEN, {}),
    )


def _compared(
    outcome: Objective, step: Step, trainer: Trainer, device: torch.device, coverage: Coverage
) -> Objective:
    cell, dtype = trainer.cell, trainer.cell.dtype
    comparison = _comparison(step, trainer, outcome.tokens, device, coverage)
    found, noise = comparison.found, comparison.noise
    limits = {name: noise.limits(name, dtype, error.distance) for name, error in found.items()}
    gradients = {f"gradient of {name}": (found[name].distance, limits[name].distance) for name in found}
    scales = {
        f"scale of the gradient of {name}": (abs(found[name].scale), limits[name].scale) for name in found
    }
    whole = "the whole gradient" if coverage.is_whole else "the compared gradients"
    norms = _norm_errors(step, cell.optimizer)
    compared = {
        "loss": (comparison.loss.error(step.loss), max(FLOORS[dtype].loss, FACTOR * noise.loss)),
        **_nearest(gradients),
        **_nearest(scales),
        f"scale of {whole}": (abs(whole_scale(found)), noise.whole_limit(dtype)),
        **{name: (error, NORM_LIMIT) for name, error in norms.items()},
    }
    is_wrong = any(not error <= limit for error, limit in compared.values())
    mistakes = _mistakes(comparison, cell)
    return replace(
        outcome,
        cause=_cause(comparison, step, cell) if is_wrong else None,
        parameters=len(found),
        errors={name: error for name, (error, _) in compared.items()},
        limits={name: limit for name, (_, limit) in compared.items()},
        noise={"loss": noise.loss, "grad_norm": noise.grad_norm},
        mistakes={name: size for name, (size, _) in mistakes.items()},
        mistake_limits={name: limit for name, (_, limit) in mistakes.items()},
    )


def _mistakes(comparison: Comparison, cell: RunConfig) -> dict[str, Compared]:
    """What known mistakes would change where they show most, and the limit there."""
    if cell.sp_degree == 1:
        return {}
    noise = comparison.noise
    scale = min(noise.limits(name, cell.dtype, 1 - 1 / cell.sp_degree).scale for name in noise.gradients)
    found = {"gradients divided by sp_degree": (1 - 1 / cell.sp_degree, scale)}
    if comparison.mistaken:
        found["a factor of 1 % on all gradients"] = (0.01, noise.whole_limit(cell.dtype))
        sizes = {
            name: (error.distance, noise.limits(name, cell.dtype, error.distance).distance)
            for name, error in comparison.mistaken.items()
        }
        found |= {"losses averaged over ranks": next(iter(_nearest(sizes).values()))}
    return found


def _cause(comparison: Comparison, step: Step, cell: RunConfig) -> str | None:
    """Tokens that were lost or moved, or the factor that alone makes the found gradients wrong."""
    if not step.fed_right:
        return "the ranks saw other tokens than the step holds: some were dropped, repeated or misplaced"
    for factor, errors in comparison.divided.items():
        if all(
            error.distance <= comparison.noise.limits(name, cell.dtype, error.distance).distance
            for name, error in errors.items()
        ):
            said = "sp_degree" if factor > 1 else "1/sp_degree"
            return f"gradients are exactly {said} = {factor:g} times too large"
    return None


def mean_of_ranks(strategy: Strategy, sequences: Sequence[Batch]) -> Weights:
    """Of a known mistake: each rank's own mean over its valid tokens, then the mean over ranks."""

    def weights(batch: Batch) -> Tensor:
        found = torch.zeros(batch.labels.shape, dtype=torch.float64, device=batch.labels.device)
        for rank in range(strategy.cell.sp_degree):
            pieces = strategy.facts.slices(strategy.cell, batch.labels.shape[1], rank)
            valid = sum(int(count_valid(batch.labels[:, piece])) for piece in pieces)
            for piece in pieces:
                found[:, piece] = 1 / (strategy.cell.sp_degree * len(sequences) * max(1, valid))
        return found

    return weights


def _nearest(compared: Mapping[str, Compared]) -> dict[str, Compared]:
    """The one that is beyond its limit, whatever the limit, or comes nearest to it; nan is beyond any."""

    def nearness(name: str) -> tuple[bool, float]:
        error, limit = compared[name]
        return not error <= limit, error / (limit or 1.0)

    name = max(compared, key=nearness)
    return {name: compared[name]}


def _norm_errors(step: Step, optimizer: OptimizerConfig) -> dict[str, float]:
    """How far the norms are from those of the gradients, relative, clipped as they should be."""
    expected = {
        "gradient norm that the step reports": (step.reported_norm, step.norm),
        "gradient norm that the optimizer was given": (step.given_norm, clipped_norm(step.norm, optimizer)),
    }
    return {name: abs(found - exact) / (exact or 1.0) for name, (found, exact) in expected.items()}


def _step(trainer: Trainer, tokens: int, coverage: Coverage) -> Step:
    """Take the step; return what it gave the optimizer."""
    loss_sum, valid_tokens = trainer.accumulate(0, tokens)
    gradients, lengths = {}, [0.0]
    for name, gradient in trainer.engine.full_gradients():
        if dist.get_rank() == 0:
            lengths.append(float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)))
            if name in coverage:
                gradients[name] = gradient.detach().cpu().clone()  # clipping scales them in place
    total = loss_sum.double()
    dist.all_reduce(total)
    fed_right = all_fed(trainer.fed.take().to(total.device)) == expected_digest(trainer.data, 0, tokens)
    reported = float(trainer.engine.update())
    return Step(
        loss=float(total / valid_tokens.clamp(min=1)),
        gradients=gradients,
        norm=math.hypot(*lengths),
        reported_norm=reported,
        given_norm=_given_norm(trainer.engine, total.device),
        own_losses=float(loss_sum),
        fed_right=fed_right,
    )


def _given_norm(engine: Engine, device: torch.device) -> float:
    """The norm of the whole gradient behind the optimizer's first moment, which was 0 before its only update.

    Every rank must call it; replicas count once.
    """
    own = torch.tensor(engine.shard_index, device=device)
    indices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(indices, own)
    is_first = [int(index) for index in indices].index(int(own)) == dist.get_rank()
    kind = OPTIMIZERS[engine.cell.optimizer.name]
    square = torch.zeros((), dtype=torch.float64, device=device)
    for _, moment in engine.optimizer_state(kind.keys[0]) if is_first else ():
        square += moment.double().square().sum().to(device)
    dist.all_reduce(square)
    return float(square.sqrt()) / kind.first_share


def _checked_cell(cell: RunConfig, tokens: int) -> RunConfig:
    """The cell whose data are checked: its own, or documents that are shorter than the step.

    Of a text's own, one may be longer, and no boundary be met.
    """
    if not cell.data.packs:
        return replace(cell, data=replace(cell.data, prompt_tokens=0))
    data = replace(cell.data, name="synthetic", path=None, tokenizer=None, prompt_tokens=0)
    return replace(cell, data=data, seq_len=tokens)


PASS = ObjectivePass
