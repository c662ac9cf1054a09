"""The section of `experiment=probe`: which tokens see which, strategy by strategy and layout by layout."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.measure.probe.section import EXPERIMENT, MODEL, Moved, ProbeSection
from bench.record.record import Record

READING = (
    "Positions that moved when one token changed, of those looked at, added up over all changes and ranks."
    " Other: of other documents, none may move. Earlier: of the same document, before the token; none may."
    " Own: from the token on, which should move. In model: the whole; a kind of layer is run by itself."
    " Loss: the largest error of a position's loss against float64 on one device, relative to the mean loss."
)


@dataclass(frozen=True, slots=True)
class ProbedPart:
    """One part of one cell that was probed to its end."""

    record: Record
    probe: ProbeSection
    kind: str
    """`model`, or a kind of layer."""

    @property
    def moved(self) -> Moved:
        return self.probe.moved[self.kind]

    def setting(self, key: str) -> str:
        """Return a setting of the cell as text."""
        return str(self.record.config[key])


def probe(findings: Findings) -> Section | None:
    """Return the probed parts of all cells."""
    frame = findings.archive.frame
    records = map(findings.archive.record, frame.index[frame["experiment"].eq(EXPERIMENT)])
    probed = [(record, record.probe) for record in records if record.probe is not None]
    rows = [ProbedPart(record, found, kind) for record, found in probed for kind in found.moved]
    if not rows:
        return None
    table = Table.of(COLUMNS, rows, DISPENSABLE)
    return Section("Leak probe", (), table, READING, prints_table=True, answers=True)


def _loss(part: ProbedPart, value: float | None) -> str:
    if part.kind != MODEL:
        return ""
    return "not finite" if value is None else f"{value:.1e}"


def _counts(moved: int, of: int) -> str:
    return f"{moved:,} of {of:,}"


DISPENSABLE = ("limit", "dtype", "own outputs", "loss off by")
"""Columns that a narrow terminal does without, in this order."""
COLUMNS = (
    Column("strategy", lambda part: part.setting("strategy"), is_words=True),
    Column("layout", lambda part: part.setting("layout"), is_words=True),
    Column("ranks", lambda part: part.setting("sp_degree")),
    Column("dtype", lambda part: part.setting("dtype"), is_words=True),
    Column("in", lambda part: str(part.kind), is_words=True),
    Column("other outputs", lambda part: _counts(part.moved.other_outputs, part.moved.other_positions)),
    Column("other gradients", lambda part: _counts(part.moved.other_gradients, part.moved.other_positions)),
    Column("earlier outputs", lambda part: _counts(part.moved.earlier_outputs, part.moved.earlier_positions)),
    Column("own outputs", lambda part: _counts(part.moved.own_outputs, part.moved.own_positions)),
    Column("loss off by", lambda part: _loss(part, part.probe.loss_error)),
    Column("limit", lambda part: _loss(part, part.probe.loss_limit)),
)
