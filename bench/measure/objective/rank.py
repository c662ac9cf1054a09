"""One step of the cell's own trainer and engine, before all others, compared with what it should have been.

What the step may differ by follows from controls: the same step on one device in the cell's dtype, with sums
in other orders. Where memory has no room for all gradients, those of three layers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist
from msgspec import structs

from bench.common.labels import size_label
from bench.config import Cell
from bench.measure.losses.rank import all_fed, expected_digest
from bench.measure.objective.coverage import Coverage, coverages, gradient_bytes, needed_bytes
from bench.measure.objective.section import ObjectiveSection, objective_tokens
from bench.measure.objective.step_errors import Step, StepErrors
from bench.measure.rank_pass import RankPass
from bench.ranks.memory_limit import without_memory_limit
from bench.training.data import open_data
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.trainers.trainer import Trainer

CPU_ROOM_BYTES = 4 * 2**30
UNCOUNTED_SHARE = 3
"""One label in so many does not count."""


class ObjectivePass(RankPass):
    found: ObjectiveSection | None = None

    def before_steps(self) -> None:
        """Take one short step, and let rank 0 compare as many gradients as memory has room for."""
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
            checked = _on_uncounted_labels(trainer, tokens, device)
            outcome = ObjectiveSection(tokens=tokens, sequences=cell.sequences_per_step)
            if chosen == len(choices):
                self.found = structs.replace(outcome, reason=because)
                # The same step, and nothing compared: cells of one work train alike, whatever room they have.
                checked.step(0, tokens)
                return
            coverage = choices[chosen]
            self.found = _compared(outcome, checked, coverage, device)
            if not coverage.is_whole:
                self.found = structs.replace(
                    self.found, noise={}, compared_parameters=str(coverage), left_out_reason=because
                )

    def part(self) -> ObjectiveSection | None:
        return self.found


def _compared(
    outcome: ObjectiveSection, trainer: Trainer, coverage: Coverage, device: torch.device
) -> ObjectiveSection:
    """Take the step and compare it on rank 0; every rank must call it."""
    step = _step(trainer, outcome.tokens, coverage)
    if not math.isfinite(step.own_losses):
        outcome = structs.replace(outcome, not_finite_ranks=[dist.get_rank()])
    if dist.get_rank() == 0:
        with without_memory_limit():
            errors = StepErrors.of(step, trainer, outcome.tokens, device, coverage)
            whole = "the whole gradient" if coverage.is_whole else "the compared gradients"
            outcome = errors.section(outcome, whole)
    dist.barrier()
    return outcome


def _on_uncounted_labels(trainer: Trainer, tokens: int, device: torch.device) -> Trainer:
    """Return the training loop with data in which a third of the labels does not count."""
    own_tokens = min(tokens, trainer.cell.seq_len)
    cell, uncounted = _checked_cell(trainer.cell, own_tokens), own_tokens // UNCOUNTED_SHARE
    return replace(trainer, data=open_data(cell, device, uncounted_tokens=uncounted))


def _first_that_fits(cell: Cell, tokens: int, choices: Sequence[Coverage], device: torch.device) -> int:
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
    kind = OPTIMIZER_FACTS[engine.cell.optimizer.name]
    square = torch.zeros((), dtype=torch.float64, device=device)
    for _, moment in engine.optimizer_state(kind.state_keys[0]) if is_first else ():
        square += moment.double().square().sum().to(device)
    dist.all_reduce(square)
    return float(square.sqrt()) / kind.first_share


def _checked_cell(cell: Cell, tokens: int) -> Cell:
    """The cell whose data are checked: its own, or documents that are shorter than the step.

    Of a text's own, one may be longer, and no boundary be met.
    """
    if not cell.data.packs:
        return replace(cell, data=replace(cell.data, prompt_tokens=0))
    data = replace(cell.data, name="synthetic", path=None, tokenizer=None, prompt_tokens=0)
    return replace(cell, data=data, seq_len=tokens)


PASS = ObjectivePass
