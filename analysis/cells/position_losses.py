"""Losses by position of cells that train on the same tokens, for the longest sequence of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.cells.equivalence import LOSS_EQUIVALENCE
from analysis.read.archive import Archive
from bench.measure.losses.section import LossByPosition, LossesSection
from bench.record.record import Record, Role

OWN_INPUT = ("model.path", "data.path")
"""Settings for weights or texts of the user. Random weights have the same loss at every position."""


@dataclass(frozen=True, slots=True)
class PositionGroup:
    """Reference and the cells that were compared with it."""

    reference: Record
    compared: Sequence[Record]

    @property
    def seq_len(self) -> int:
        return int(self.reference.config["seq_len"])

    @property
    def limit(self) -> float:
        """Largest relative difference that passes in any of the cells."""
        matches = [losses_of(record).position_match for record in self.compared]
        return max(match.limit for match in matches if match is not None)


def losses_of(record: Record) -> LossesSection:
    """Return the losses of a record that has them."""
    assert record.losses is not None
    return record.losses


def by_position(record: Record) -> LossByPosition:
    """Return the losses by position of a record that has them."""
    losses = losses_of(record).by_position
    assert losses is not None
    return losses


def differences(record: Record, reference: Record) -> list[float | None]:
    """Return the relative difference of each part's loss, and at the end that of the boundary positions."""
    pairs = zip(_all_losses(record), _all_losses(reference), strict=True)
    return [
        None if value is None or expected is None else abs(value - expected) / (abs(expected) or 1.0)
        for value, expected in pairs
    ]


def longest_group(archive: Archive) -> PositionGroup | None:
    """Return the group with the longest sequence and, of several, the most cells; None without a group.

    Cells that train a model of `experiment=quality`, and cells with random weights and the default text, are
    left out.
    """
    frame = archive.frame
    records = [archive.record(row) for row in frame.index[frame["first_loss"].notna()]]
    with_losses = [
        record
        for record in records
        if record.losses is not None
        and record.losses.by_position is not None
        and record.role is not Role.TRAINING
        and (record.experiment == LOSS_EQUIVALENCE or any(record.config.get(key) for key in OWN_INPUT))
    ]
    references = {record.cell_id: record for record in with_losses if record.repeat == 0}
    groups: dict[str, list[Record]] = {}
    for record in with_losses:
        match = losses_of(record).position_match
        base = losses_of(record).compared_with
        if match is not None and base in references:
            groups.setdefault(str(base), []).append(record)
    found = [PositionGroup(references[base], compared) for base, compared in groups.items()]
    return max(found, key=lambda group: (group.seq_len, len(group.compared)), default=None)


def _all_losses(record: Record) -> list[float | None]:
    losses = by_position(record)
    return [*losses.loss, losses.boundary_loss]
