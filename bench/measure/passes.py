"""The passes of a built cell, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.config import RunConfig
from bench.gates import WrongResultError
from bench.measure.gradients import write_gradients
from bench.measure.inspection import Inspection
from bench.measure.losses import collect_losses
from bench.measure.memory import MemoryWatch
from bench.measure.modules import watch_modules
from bench.measure.objective import check_objective
from bench.measure.parity import ParityOutcome, check_parity
from bench.measure.telemetry import Telemetry, open_nvml
from bench.measure.timing import short_step, time_steps
from bench.measure.trace import trace_step, trace_steps
from bench.memory_limit import without_memory_limit
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
    memory: MemoryWatch
    parity_is_known: bool


def _parity(trainer: NativeTrainer, device: torch.device) -> dict[str, Any]:
    """Errors and limits of attention and of the objective; raises WrongResultError where one is beyond."""
    checks: Mapping[str, Callable[[], ParityOutcome]] = {
        "attention": partial(check_parity, trainer.strategy, device),
        "objective": partial(check_objective, trainer, device),
    }
    section: dict[str, Any] = {"checked_in": trainer.cell.cell_id, "errors": {}, "limits": {}}
    for name, check in checks.items():
        outcome = check()
        if outcome.divergence is not None:
            raise WrongResultError(f"{name} parity: {outcome.divergence}")
        section["tokens"] = outcome.tokens
        section["errors"] |= outcome.errors
        section["limits"] |= outcome.limits
    return section


def run_passes(built: BuiltCell, log: RankLog) -> dict[str, Any]:
    """This rank's part of every section; losses are the same on every rank."""
    cell, trainer, device = built.cell, built.trainer, built.device
    sections: dict[str, Any] = {}
    if cell.measure.gradients:
        with log.during("gradients"):
            write_gradients(trainer, cell, built.folder)
    if not built.parity_is_known:
        with log.during("parity"), without_memory_limit():
            sections["parity"] = _parity(trainer, device)
    multiple = trainer.strategy.facts.length_multiple(cell)
    with log.during("steps"):
        with watch_modules() as modules, built.memory.life:
            short_step(trainer, cell, multiple)
        telemetry = Telemetry(partial(open_nvml, device))
        timed = time_steps(trainer, cell, device, log.tell, partial(_watched, built.memory, telemetry))
    sections["timing"] = {
        "step_times_ms": timed.step_times_ms,
        "window_ms": timed.window_ms,
        "warmup": timed.warmup,
    }
    with log.during("losses"):
        sections["losses"] = asdict(collect_losses(timed.outcomes, trainer, cell))
    sections["telemetry"] = asdict(telemetry.read())
    inspection = Inspection(trainer.strategy, built.memory.steady)
    # A long step hides what looking costs; a short one does not, and then there is time for one more.
    shares_step = cell.measure.trace and timed.warmup == "short"
    if not shares_step:
        with log.during("inspection"), inspection.looking():
            trainer.step(timed.next_step, cell.seq_len)
    if cell.measure.trace:
        with log.during("trace"):
            # The profiler's first use is slow: a short step pays for it.
            trace_step(lambda: short_step(trainer, cell, multiple), device)
            with inspection.looking() if shares_step else nullcontext():
                steps = range(timed.next_step, timed.next_step + (1 if shares_step else TRACED_STEPS))
                traced = trace_steps(lambda number: trainer.step(number, cell.seq_len), steps, device)
        sections["trace"] = asdict(traced)
    sections["engagement"] = {
        "attention_name": trainer.wiring.attention_name,
        "modules": sorted(modules),
        "attention_shapes": sorted(map(list, inspection.watch.shapes)),
        "sent_bytes": inspection.tap.sent_bytes(),
        "calls": inspection.tap.calls_by_kind(),
    }
    sections["memory"] = asdict(built.memory.read()) | {"limit_base_bytes": log.limit_base_bytes}
    return sections


@contextmanager
def _watched(memory: MemoryWatch, telemetry: Telemetry) -> Iterator[None]:
    """Around a timed window: nothing of it runs between the steps."""
    memory.start_window()
    with telemetry.window():
        yield
    memory.end_window()
