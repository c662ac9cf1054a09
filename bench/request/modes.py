"""The values of `mode`: `measure`, and those that the command adds to the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.config import ConfigError, RunConfig
from bench.record.record import Provenance, Record
from bench.request.packages import package_refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of making a cell's record."""

    provenance: Provenance
    """Provenance of its records."""
    refusals: Callable[[RunConfig], list[str]]
    """Reasons, each with a way out, why a cell cannot have this mode that may have another."""
    starts_ranks: bool = True
    complete: Callable[[RunConfig, Record], Record] = lambda _, record: record
    """Adds to the record of a cell what only this mode knows. Without ranks the record comes with status ok
    and without sections."""


MODES: dict[str, Mode] = {"measure": Mode(provenance=Provenance.MEASURED, refusals=package_refusals)}
"""The modes by their names. `bench.extras.predict.modes.register` adds `replay` and `predict`."""


def mode_of(cell: RunConfig) -> Mode:
    """Return the mode of a cell; raises ConfigError for one that is not in the table."""
    if cell.mode not in MODES:
        raise ConfigError(
            f"mode={cell.mode}: run_sweep.py adds this mode; elsewhere call"
            " bench.extras.predict.modes.register()"
        )
    return MODES[cell.mode]


def starts_ranks(cell: RunConfig) -> bool:
    """Return whether ranks of the cell run; otherwise its record is computed."""
    return mode_of(cell).starts_ranks
