"""The objective pass on a rank: it compares one step of the cell's trainer and engine with float64.

The step runs before all others. Limits follow the errors of controls, which compute the same step on one
device in the cell's dtype with sums in other orders. If memory has no room for all gradients, only those of
three layers are compared, or none.
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
from bench.measure.losses.gradient_sums import shard_offsets
from bench.measure.losses.rank import expected_digest, global_digest
from bench.measure.objective.coverage import Coverage, coverages, gradient_bytes, needed_bytes
from bench.measure.objective.section import ObjectiveSection, objective_tokens
from bench.measure.objective.step_errors import ObjectiveStep, StepErrors
from bench.measure.rank_pass import RankPass
from bench.ranks.memory_limit import without_memory_limit
from bench.training.data import open_data
from bench.training.engines.engine import Engine
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.trainers.trainer import Trainer

CPU_ROOM_BYTES = 4 * 2**30
"""Largest memory that the comparison may take on a CPU."""
UNCOUNTED_SHARE = 3
"""Number of tokens divided by the number of labels that do not count in the loss."""


class ObjectivePass(RankPass):
    section: ObjectiveSection | None = None

    def before_steps(self) -> None:
        """Take one short step, of which rank 0 compares as many gradients as memory has room for."""
        trainer, device = self.measurement.subject.trainer, self.measurement.subject.device
        if trainer is None:
            return
        with self.measurement.log.run_phase("objective"):
            cell = trainer.cell
            tokens = objective_tokens(cell.padded_len, trainer.strategy.facts.length_multiple(cell))
            choices = [*coverages(cell)]
            fitting = self.broadcast_count(_index_of_first_fit(cell, tokens, choices, device))
            needed = size_label(needed_bytes(cell, tokens, choices[0]))
            kept = size_label(gradient_bytes(cell, choices[0]))
            reason = f"all gradients would take about {needed} on one rank and {kept} in its host memory"
            short_trainer = _with_uncounted_labels(trainer, tokens, device)
            section = ObjectiveSection(tokens=tokens, sequences=cell.sequences_per_step)
            if fitting == len(choices):
                self.section = structs.replace(section, reason=reason)
                # Take the step anyway, so that all cells of a workload train alike.
                short_trainer.step(0, tokens)
                return
            coverage = choices[fitting]
            self.section = _compare_step(section, short_trainer, coverage, device)
            if not coverage.is_whole:
                self.section = structs.replace(
                    self.section, noise={}, compared_parameters=str(coverage), left_out_reason=reason
                )

    def part(self) -> ObjectiveSection | None:
        return self.section


def _compare_step(
    section: ObjectiveSection, trainer: Trainer, coverage: Coverage, device: torch.device
) -> ObjectiveSection:
    """Take the step and return the section; only rank 0 compares the step. Every rank must call it."""
    step = _take_step(trainer, section.tokens, coverage)
    if not math.isfinite(step.local_loss_sum):
        section = structs.replace(section, not_finite_ranks=[dist.get_rank()])
    if dist.get_rank() == 0:
        with without_memory_limit():
            errors = StepErrors.compute(step, trainer, section.tokens, device, coverage)
            label = "the whole gradient" if coverage.is_whole else "the compared gradients"
            section = errors.fill(section, label)
    dist.barrier()
    return section


def _with_uncounted_labels(trainer: Trainer, tokens: int, device: torch.device) -> Trainer:
    """Return the trainer with data in which a third of the labels does not count."""
    unpadded = min(tokens, trainer.cell.seq_len)
    cell, uncounted = _short_cell(trainer.cell, unpadded), unpadded // UNCOUNTED_SHARE
    return replace(trainer, data=open_data(cell, device, uncounted_tokens=uncounted))


def _index_of_first_fit(cell: Cell, tokens: int, choices: Sequence[Coverage], device: torch.device) -> int:
    """Return the index of the first choice that fits into memory, or the number of choices if none fits.

    With a GPU the comparison may take half of the free memory of the GPU and half of the host's, because the
    steps that run later need memory, too.
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


def _take_step(trainer: Trainer, tokens: int, coverage: Coverage) -> ObjectiveStep:
    """Take the step and return its loss, the engine's gradients and norms; every rank must call it."""
    loss_sum, valid_tokens = trainer.accumulate(0, tokens)
    gradients, lengths = {}, [0.0]
    for name, gradient in trainer.engine.full_gradients():
        if dist.get_rank() == 0:
            lengths.append(float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)))
            if name in coverage:
                gradients[name] = gradient.detach().cpu().clone()  # clipping scales gradients in place
    total = loss_sum.double()
    dist.all_reduce(total)
    digest = global_digest(trainer.input_digest.take().to(total.device))
    reported_norm = float(trainer.engine.update())
    return ObjectiveStep(
        loss=float(total / valid_tokens.clamp(min=1)),
        gradients=gradients,
        norm=math.hypot(*lengths),
        reported_norm=reported_norm,
        given_norm=_given_norm(trainer.engine, total.device),
        local_loss_sum=float(loss_sum),
        has_right_tokens=digest == expected_digest(trainer.data, 0, tokens),
    )


def _given_norm(engine: Engine, device: torch.device) -> float:
    """Return the norm of the whole gradient from which the optimizer computed its first moment.

    It is computed from this moment, which was 0 before its only update. Every rank must call this function;
    replicas count once.
    """
    facts = OPTIMIZER_FACTS[engine.cell.optimizer.name]
    moments = [moment for _, moment in engine.optimizer_state(facts.state_keys[0])]
    _, is_first_replica = shard_offsets(engine, moments, device)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for moment in moments if is_first_replica else ():
        square += moment.double().square().sum().to(device)
    dist.all_reduce(square)
    return float(square.sqrt()) / facts.first_share


def _short_cell(cell: Cell, tokens: int) -> Cell:
    """Return the cell with the data of the checked step, in which no token belongs to a prompt.

    A cell that packs documents gets synthetic documents, because a document of real text may be longer than
    the step, and no boundary would be checked.
    """
    if not cell.data.packs:
        return replace(cell, data=replace(cell.data, prompt_tokens=0))
    data = replace(cell.data, name="synthetic", path=None, tokenizer=None, prompt_tokens=0)
    return replace(cell, data=data, seq_len=tokens)


PASS = ObjectivePass
