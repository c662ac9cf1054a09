"""One step of the cell's own trainer and engine, and what it should have been.

What the step may differ by follows from controls: the same step on one device in the cell's dtype, with sums
in other orders. Where the whole model in float64 has no room, a cut of the model is compared, under DDP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from bench.config import LOW_PRECISION, OptimizerConfig, RunConfig
from bench.labels import size_label
from bench.passes.losses.rank import all_fed, expected_digest
from bench.passes.objective.cut import cut_cell, cut_trainer
from bench.passes.objective.plain_attention import plain_attention_installed
from bench.passes.objective.section import Objective, objective_tokens
from bench.passes.objective.whole_model import (
    CONTROLS,
    FACTOR,
    Noise,
    Signal,
    Weights,
    WholeModel,
    needed_bytes,
    whole_scale,
)
from bench.passes.parity.limits import FLOORS
from bench.passes.rank_pass import RankPass
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import Batch, Strategy
from bench.training.data import count_valid, open_data
from bench.training.engines import Engine
from bench.training.optimizer import OPTIMIZERS, clipped_norm
from bench.training.trainer_facts import TRAINER_FACTS
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

    signal: Signal
    """Gradients on rank 0 only."""
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
            tokens = objective_tokens(
                trainer.cell.padded_len, trainer.strategy.facts.length_multiple(trainer.cell)
            )
            if self._fits(trainer.cell, tokens):
                self.found = check(trainer, tokens, device)
                return
            needed = size_label(needed_bytes(trainer.cell, tokens))
            reason = f"float64 on one rank would take about {needed}"
            self.found = Objective(tokens=tokens, sequences=trainer.cell.sequences_per_step, reason=reason)
            is_stack = TRAINER_FACTS[trainer.cell.trainer].is_stack  # those build engines of their own
            if not is_stack and self._fits(cut_cell(trainer.cell, tokens), tokens):
                cut = cut_trainer(trainer, tokens, device)
                self.found = replace(check(cut, tokens, device), noise={}, cut_because=reason)
            take(trainer, tokens, device)

    def part(self) -> Objective | None:
        return self.found

    def _fits(self, cell: RunConfig, tokens: int) -> bool:
        return bool(self.agreed(needed_bytes(cell, tokens) <= _room_bytes(self.measurement.subject.device)))


def check(trainer: Trainer, tokens: int, device: torch.device) -> Objective:
    """Take one short step, before any other; every rank must call it, and rank 0 compares."""
    checked = _on_uncounted_labels(trainer, tokens, device)
    found = _step(checked, tokens)
    lost = [] if math.isfinite(found.own_losses) else [dist.get_rank()]
    outcome = Objective(tokens=tokens, sequences=trainer.cell.sequences_per_step, lost_on=lost)
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


def _compared(outcome: Objective, step: Step, trainer: Trainer, device: torch.device) -> Objective:
    dtype = trainer.cell.dtype
    with plain_attention_installed() as attention:
        model = WholeModel(trainer, outcome.tokens, device, attention)
        exact = model.exact()
        noise = Noise.of(exact, (model.rounded(key_parts=parts) for parts in CONTROLS))
        mistakes = _mistakes(model, exact, noise, trainer.strategy)
    found = exact.gradient_errors(step.signal)
    limits = {name: noise.limits(name, dtype, error.distance) for name, error in found.items()}
    gradients = {f"gradient of {name}": (found[name].distance, limits[name].distance) for name in found}
    scales = {
        f"scale of the gradient of {name}": (abs(found[name].scale), limits[name].scale) for name in found
    }
    norms = _norm_errors(step, trainer.cell.optimizer)
    compared = {
        "loss": (exact.loss_error(step.signal), max(FLOORS[dtype].loss, FACTOR * noise.loss)),
        **_nearest(gradients),
        **_nearest(scales),
        "scale of the whole gradient": (abs(whole_scale(found)), noise.whole_limit(dtype)),
        **{name: (error, NORM_LIMIT) for name, error in norms.items()},
    }
    is_wrong = any(not error <= limit for error, limit in compared.values())
    return replace(
        outcome,
        cause=_cause(exact, step, noise, trainer.cell) if is_wrong else None,
        parameters=len(found),
        errors={name: error for name, (error, _) in compared.items()},
        limits={name: limit for name, (_, limit) in compared.items()},
        noise={"loss": noise.loss, "grad_norm": noise.grad_norm},
        mistakes={name: size for name, (size, _) in mistakes.items()},
        mistake_limits={name: limit for name, (_, limit) in mistakes.items()},
    )


def _mistakes(model: WholeModel, exact: Signal, noise: Noise, strategy: Strategy) -> dict[str, Compared]:
    """What known mistakes would change where they show most, and the limit there."""
    cell = strategy.cell
    if cell.sp_degree == 1:
        return {}
    scale = min(noise.limits(name, cell.dtype, 1 - 1 / cell.sp_degree).scale for name in noise.gradients)
    found = {"gradients divided by sp_degree": (1 - 1 / cell.sp_degree, scale)}
    if cell.dtype in LOW_PRECISION:  # in others rounding hides nothing
        found["a factor of 1 % on all gradients"] = (0.01, noise.whole_limit(cell.dtype))
        wrong = exact.gradient_errors(model.rounded(weights=mean_of_ranks(strategy, model.sequences)))
        sizes = {
            name: (error.distance, noise.limits(name, cell.dtype, error.distance).distance)
            for name, error in wrong.items()
        }
        found |= {"losses averaged over ranks": next(iter(_nearest(sizes).values()))}
    return found


def _cause(exact: Signal, step: Step, noise: Noise, cell: RunConfig) -> str | None:
    """Tokens that were lost or moved, or the factor that alone makes the found gradients wrong."""
    if not step.fed_right:
        return "the ranks saw other tokens than the step holds: some were dropped, repeated or misplaced"
    found = step.signal
    for factor, said in ((cell.sp_degree, "sp_degree"), (1 / cell.sp_degree, "1/sp_degree")):
        divided = {name: gradient / factor for name, gradient in found.gradients.items()}
        errors = exact.gradient_errors(replace(found, gradients=divided))
        if cell.sp_degree > 1 and all(
            error.distance <= noise.limits(name, cell.dtype, error.distance).distance
            for name, error in errors.items()
        ):
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
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in step.signal.gradients.values()))
    expected = {
        "gradient norm that the step reports": (step.reported_norm, norm),
        "gradient norm that the optimizer was given": (step.given_norm, clipped_norm(norm, optimizer)),
    }
    return {name: abs(found - exact) / (exact or 1.0) for name, (found, exact) in expected.items()}


def _step(trainer: Trainer, tokens: int) -> Step:
    """What the step told the optimizer."""
    loss_sum, valid_tokens = trainer.accumulate(0, tokens)
    gradients = {}
    for name, gradient in trainer.engine.full_gradients():
        if dist.get_rank() == 0:
            gradients[name] = gradient.detach().cpu().clone()  # clipping scales them in place
    total = loss_sum.double()
    dist.all_reduce(total)
    fed_right = all_fed(trainer.fed.take().to(total.device)) == expected_digest(trainer.data, 0, tokens)
    reported = float(trainer.engine.update())
    signal = Signal(float(total / valid_tokens.clamp(min=1)), gradients)
    return Step(signal, reported, _given_norm(trainer.engine, total.device), float(loss_sum), fed_right)


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
