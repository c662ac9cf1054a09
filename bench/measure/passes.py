"""The passes of a built cell, in order."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.config import RunConfig
from bench.gates import WrongResultError
from bench.measure.gradients import write_gradients
from bench.measure.inspection import Inspection
from bench.measure.losses import collect_losses
from bench.measure.memory import read_memory, reset_peak
from bench.measure.modules import watch_modules
from bench.measure.parity import check_parity
from bench.measure.timing import short_step, time_steps
from bench.measure.trace import StepWatch, keep_or_remove, read_step, trace_steps, warm_profiler
from bench.rank_log import RankLog
from bench.training.trainers import NativeTrainer

TRACED_STEPS = 3
"""One is kept: a single step of a few milliseconds says little on a machine with neighbours."""


@dataclass(frozen=True, slots=True)
class BuiltCell:
    """A cell on one rank, ready to train."""

    cell: RunConfig
    trainer: NativeTrainer
    device: torch.device
    folder: Path
    base_resident_bytes: int


def run_passes(built: BuiltCell, log: RankLog) -> dict[str, Any]:
    """This rank's part of every section; losses are the same on every rank."""
    cell, trainer, device = built.cell, built.trainer, built.device
    sections: dict[str, Any] = {}
    if cell.measure.gradients:
        with log.during("gradients"):
            write_gradients(trainer, cell, built.folder)
    with log.during("parity"):
        parity = check_parity(trainer.strategy, device)
        if parity.divergence is not None:
            raise WrongResultError(f"attention parity: {parity.divergence}")
    sections["parity"] = {"tokens": parity.tokens, "errors": parity.errors, "limits": parity.limits}
    multiple = trainer.strategy.facts.length_multiple(cell)
    with log.during("steps"):
        with watch_modules() as modules:
            short_step(trainer, cell, multiple)
        reset_peak(device)
        timed = time_steps(trainer, cell, device, log.tell)
    sections["timing"] = {
        "step_times_ms": timed.step_times_ms,
        "window_ms": timed.window_ms,
        "warmup": timed.warmup,
    }
    with log.during("losses"):
        sections["losses"] = asdict(collect_losses(timed.outcomes, trainer, cell))
    inspection = Inspection(trainer.strategy, device)
    # A long step hides what looking costs; a short one does not, and then there is time for one more.
    shares_step = cell.measure.trace and timed.warmup == "short"
    if not shares_step:
        with log.during("inspection"), inspection.looking():
            trainer.step(timed.next_step, cell.seq_len)
    if cell.measure.trace:
        with log.during("trace"):
            sections["trace"] = _trace(built, inspection, timed.next_step, shares_step=shares_step)
    sections["engagement"] = {
        "attention_name": trainer.wiring.attention_name,
        "modules": sorted(modules),
        "attention_shapes": sorted(map(list, inspection.watch.shapes)),
        "sent_bytes": inspection.tap.sent_bytes(),
        "calls": inspection.tap.calls_by_kind(),
    }
    memory = read_memory(device, built.base_resident_bytes, inspection.cpu_peak_bytes)
    sections["memory"] = asdict(memory)
    return sections


def _trace(built: BuiltCell, inspection: Inspection, first_step: int, *, shares_step: bool) -> dict[str, Any]:
    """Trace full-length steps; the calls of an inspected step tell what each transfer was for."""
    cell, trainer, device, folder = built.cell, built.trainer, built.device, built.folder
    looking = inspection.looking if shares_step else inspection.watching
    watch = StepWatch(inspection.watch, trainer.engine, looking)
    warm_profiler()
    steps = range(first_step, first_step + (1 if shares_step else TRACED_STEPS))
    traced = trace_steps(lambda number: trainer.step(number, cell.seq_len), steps, watch, device, folder)
    section = read_step(traced, inspection.tap.calls, device.type)
    keep_or_remove(traced, folder, keep=cell.measure.keep_traces)
    return section
