"""One step of the cell's own trainer and engine, and what it should have been.

The parity pass asks the same of a cut model under DDP, at fewer tokens, and names known mistakes. Here
nothing is cut: what an engine, checkpointing or accumulation does to a gradient shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from bench.config import OptimizerConfig, RunConfig
from bench.labels import size_label
from bench.passes.objective.section import Objective, objective_tokens
from bench.passes.objective.whole_model import GradientError, Signal, needed_bytes, whole_model
from bench.passes.parity.limits import STEP_FACTOR, gradient_limit, limit_of, loss_limit
from bench.passes.rank_pass import RankPass
from bench.ranks.memory_limit import without_memory_limit
from bench.training.data import open_data
from bench.training.engines import Engine
from bench.training.optimizer import clipped_norm
from bench.training.trainers.trainer import Trainer

CPU_ROOM_BYTES = 4 * 2**30
Compared = tuple[float, float]
"""An error and its limit."""
UNCOUNTED_SHARE = 3
"""One label in so many does not count."""
SCALE_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 6e-3}
"""In bf16 those of parameters of 64 numbers and more were off by up to 3.4e-3."""
CHANCE = 4.0
"""Of a deviation in a random direction the part along a gradient of n numbers is about its length / sqrt(n).
Those of 16 numbers were off by up to 7e-3 in bf16, 2.2 times as much as that."""
NORM_LIMIT = 1e-3
"""Of the gradient's norm as the engine reports it and as the optimizer was given it, against the gradients
that the engine shows. Sound steps were off by up to 7e-7: only the order of a sum differs."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks together."""

    signal: Signal
    """Gradients on rank 0 only."""
    reported_norm: float
    """The gradients' norm as the engine says it was before clipping."""
    given_norm: float
    """The norm of what the optimizer made its first moment of."""


class ObjectivePass(RankPass):
    found: Objective | None = None

    def before_steps(self) -> None:
        trainer = self.measurement.subject.trainer
        if trainer is None:
            return
        with self.measurement.log.during("objective"):
            cell = trainer.cell
            tokens = objective_tokens(cell.padded_len, trainer.strategy.facts.length_multiple(cell))
            needed, room = needed_bytes(cell, tokens), _room_bytes(self.measurement.subject.device)
            if self.agreed(needed <= room):
                self.found = check(trainer, tokens, self.measurement.subject.device)
            else:
                take(trainer, tokens, self.measurement.subject.device)
                reason = f"float64 on one rank would take about {size_label(needed)}"
                self.found = replace(_nothing(trainer, tokens), reason=reason)

    def part(self) -> Objective | None:
        return self.found


def check(trainer: Trainer, tokens: int, device: torch.device) -> Objective:
    """Take one short step, before any other; every rank must call it, and rank 0 compares."""
    checked = _on_uncounted_labels(trainer, tokens, device)
    found = _step(checked, tokens)
    outcome = _nothing(trainer, tokens)
    if dist.get_rank() == 0:
        with without_memory_limit():
            outcome = _compared(outcome, found, checked, device)
    dist.barrier()
    return outcome


def take(trainer: Trainer, tokens: int, device: torch.device) -> None:
    """Take the same step and compare nothing: cells of one work train alike, whatever room they have."""
    _on_uncounted_labels(trainer, tokens, device).step(0, tokens)


def _on_uncounted_labels(trainer: Trainer, tokens: int, device: torch.device) -> Trainer:
    """The same training loop on data of which a third of the labels does not count."""
    own_tokens = min(tokens, trainer.cell.seq_len)
    cell, uncounted = _checked_cell(trainer.cell, own_tokens), own_tokens // UNCOUNTED_SHARE
    return replace(trainer, data=open_data(cell, device, uncounted_tokens=uncounted))


def _room_bytes(device: torch.device) -> int:
    """What a second model may take: on a GPU half of what is free, because the steps are still to come."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CPU_ROOM_BYTES


def _nothing(trainer: Trainer, tokens: int) -> Objective:
    sequences = trainer.cell.sequences_per_step
    return Objective(tokens=tokens, sequences=sequences, parameters=0, errors={}, limits={})


def _compared(outcome: Objective, step: Step, trainer: Trainer, device: torch.device) -> Objective:
    found = step.signal
    sequences, dtype = trainer.data.whole_step(0, outcome.tokens), trainer.cell.dtype
    with whole_model(trainer.cell, device) as model:
        exact = model.exact(sequences)
        control = model.rounded(sequences)
    errors = {"loss": exact.loss_error(found)}
    limits = {"loss": loss_limit(dtype, exact.loss_error(control))}
    controls = exact.gradient_errors(control)
    gradients, scales = dict[str, Compared](), dict[str, Compared]()
    for name, error in exact.gradient_errors(found).items():
        plain, what = controls[name], f"gradient of {name}"
        limit = gradient_limit(dtype, plain.distance)
        gradients[what] = error.distance, limit
        scales[f"scale of the {what}"] = error.scale, _scale_limit(dtype, plain, min(error.distance, limit))
    for compared in (gradients, scales):
        nearest = max(compared, key=lambda name: _nearness(*compared[name]))
        errors[nearest], limits[nearest] = compared[nearest]
    norms = _norm_errors(step, trainer.cell.optimizer)
    errors |= norms
    limits |= dict.fromkeys(norms, NORM_LIMIT)
    return replace(outcome, parameters=len(gradients), errors=errors, limits=limits)


def _scale_limit(dtype: str, plain: GradientError, distance: float) -> float:
    """The limit of a gradient's scale, at a distance that is allowed; `plain` is what rounding alone does."""
    by_chance = CHANCE * max(plain.distance, distance) / math.sqrt(plain.numbers)
    return max(by_chance, limit_of(SCALE_FLOORS[dtype], STEP_FACTOR, plain.scale))


def _norm_errors(step: Step, optimizer: OptimizerConfig) -> dict[str, float]:
    """How far the norms are from those of the gradients, relative, clipped as they should be."""
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in step.signal.gradients.values()))
    expected = {
        "gradient norm that the step reports": (step.reported_norm, norm),
        "gradient norm that the optimizer was given": (step.given_norm, clipped_norm(norm, optimizer)),
    }
    return {name: abs(found - exact) / (exact or 1.0) for name, (found, exact) in expected.items()}


def _nearness(error: float, limit: float) -> tuple[bool, float]:
    """What is beyond its limit comes nearest, whatever the limit; nan is beyond any."""
    return not error <= limit, error / (limit or 1.0)


def _step(trainer: Trainer, tokens: int) -> Step:
    """What the step told the optimizer."""
    loss_sum, valid_tokens = trainer.accumulate(0, tokens)
    gradients = {}
    for name, gradient in trainer.engine.full_gradients():
        if dist.get_rank() == 0:
            gradients[name] = gradient.detach().cpu().clone()  # clipping scales them in place
    total = loss_sum.double()
    dist.all_reduce(total)
    reported = float(trainer.engine.update())
    signal = Signal(float(total / valid_tokens.clamp(min=1)), gradients)
    return Step(signal, reported, _given_norm(trainer.engine, total.device))


def _given_norm(engine: Engine, device: torch.device) -> float:
    """The norm of the whole gradient behind the optimizer's first moment, which was 0 before its only update.

    Every rank must call it; replicas count once.
    """
    own = torch.tensor(engine.shard_index, device=device)
    indices = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(indices, own)
    is_first = [int(index) for index in indices].index(int(own)) == dist.get_rank()
    square = torch.zeros((), dtype=torch.float64, device=device)
    for moment in engine.first_moments() if is_first else ():
        square += moment.double().square().sum().to(device)
    dist.all_reduce(square)
    return float(square.sqrt()) / engine.first_moment.share


def _checked_cell(cell: RunConfig, tokens: int) -> RunConfig:
    """The cell whose data are checked: its own, or documents that are shorter than the step.

    Of a text's own, one may be longer, and no boundary be met.
    """
    if not cell.data.packs:
        return replace(cell, data=replace(cell.data, prompt_tokens=0))
    data = replace(cell.data, name="synthetic", path=None, tokenizer=None, prompt_tokens=0)
    return replace(cell, data=data, seq_len=tokens)


PASS = ObjectivePass
