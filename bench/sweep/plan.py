"""A sweep as a list of cells, checked as a whole before the first one starts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cell.planned import PlannedCell
from bench.config import ConfigError, RunConfig
from bench.environment import Machine
from bench.experiments import experiment_of
from bench.request import values
from bench.request.choices import Raw
from bench.request.legality import needed_packages, refusal
from bench.request.values import refuse_too_many
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will run."""

    cells: tuple[PlannedCell, ...]
    """In the order in which they run."""
    folder: Path
    """Where records and report go."""
    resume: bool
    """Whether the folder may have records already, of which the final ones are kept."""

    @property
    def packages(self) -> frozenset[str]:
        """The packages of others that some of the cells need."""
        cells = {planned.cell.cell_id: planned.cell for planned in self.cells}.values()
        return frozenset(package for cell in cells for package in needed_packages(cell).values())


def plan(raws: Sequence[Raw], machine: Machine, *, single: bool) -> Plan:
    """Validate every cell, drop duplicates, repeat, and shuffle by the seed.

    The order is random, so that heat and other processes favour no strategy. Raises ConfigError for the first
    bad value; in a single run also for an illegal combination, which a sweep records as `unsupported`.
    """
    refuse_too_many([len(raws)])
    cells = {cell.cell_id: cell for cell in experiment_of(raws).cells(raws, machine)}
    for cell in cells.values():
        _refuse_failing_facts(cell)
        if single:
            _refuse_illegal(cell)
    refuse_too_many([len(cells), max(cell.measure.repeats for cell in cells.values())])
    pairs = [(cell, repeat) for cell in cells.values() for repeat in range(cell.measure.repeats)]
    random.Random(min(cell.seed for cell in cells.values())).shuffle(pairs)
    planned = (PlannedCell(cell, repeat, order) for order, (cell, repeat) in enumerate(pairs))
    first = raws[0]
    resume = values.flag("resume", first["resume"])
    return Plan(tuple(planned), Path(values.text("sweep_dir", first["sweep_dir"])), resume)


def _refuse_illegal(cell: RunConfig) -> None:
    reason = refusal(cell)
    if reason is not None:
        raise ConfigError(reason)


def _refuse_failing_facts(cell: RunConfig) -> None:
    """Raises ConfigError where a plugin's facts fail: later, while cells run, that would end the sweep."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        answers: Mapping[str, Any] = {
            "refusals": "; ".join(STRATEGIES[cell.strategy].refusals(cell)),
            "exchange_bytes": STRATEGIES[cell.strategy].exchange_bytes(cell),
        }
        if not isinstance(answers["exchange_bytes"], int):
            raise TypeError(f"exchange_bytes must be a whole number, not {answers['exchange_bytes']!r}")
