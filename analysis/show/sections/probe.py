"""Section of `experiment=probe`: which positions change when one token is changed."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.measure.probe.section import EXPERIMENT, MODEL, Moved, ProbeSection
from bench.record.record import Record

READING = (
    "Counts: positions whose value changed when one token was changed, of the positions compared, summed over"
    " all changes and ranks. Other: positions of other documents; none may change. Earlier: positions before"
    " the token in its document; none may change. Later: the position of the token and those after it in its"
    " document, which should change. Part: the whole model, or one kind of layer run alone. Loss error:"
    " largest error of a position's loss against float64 on one device, relative to the mean loss."
)


@dataclass(frozen=True, slots=True)
class ProbedPart:
    """One part of a model in one cell whose probe is complete."""

    record: Record
    probe: ProbeSection
    kind: str
    """`model`, or the name of a kind of layer."""

    @property
    def counts(self) -> Moved:
        """Positions that changed and positions compared."""
        return self.probe.moved[self.kind]

    def setting(self, key: str) -> str:
        """Return a setting of the cell as text."""
        return str(self.record.config[key])


def probe_section(findings: Findings) -> Section | None:
    """Return the table of the probed parts of all cells; None if no cell has a complete probe."""
    frame = findings.archive.frame
    records = map(findings.archive.record, frame.index[frame["experiment"].eq(EXPERIMENT)])
    probed = [(record, record.probe) for record in records if record.probe is not None]
    rows = [ProbedPart(record, section, kind) for record, section in probed for kind in section.moved]
    if not rows:
        return None
    table = Table.from_items(COLUMNS, rows, DISPENSABLE)
    return Section("Leak probe", (), table, READING, prints_table=True, answers=True)


def _loss_text(part: ProbedPart, value: float | None) -> str:
    if part.kind != MODEL:
        return ""
    return "not finite" if value is None else f"{value:.1e}"


def _count_text(changed: int, compared: int) -> str:
    return f"{changed:,} of {compared:,}"


DISPENSABLE = ("limit", "dtype", "later outputs", "loss error")
"""Headings of the columns that a narrow terminal leaves out, in this order."""
COLUMNS = (
    Column("strategy", lambda part: part.setting("strategy"), is_words=True),
    Column("layout", lambda part: part.setting("layout"), is_words=True),
    Column("ranks", lambda part: part.setting("sp_degree")),
    Column("dtype", lambda part: part.setting("dtype"), is_words=True),
    Column("part", lambda part: str(part.kind), is_words=True),
    Column("other outputs", lambda part: _count_text(part.counts.other_outputs, part.counts.other_positions)),
    Column(
        "other gradients", lambda part: _count_text(part.counts.other_gradients, part.counts.other_positions)
    ),
    Column(
        "earlier outputs",
        lambda part: _count_text(part.counts.earlier_outputs, part.counts.earlier_positions),
    ),
    Column("later outputs", lambda part: _count_text(part.counts.own_outputs, part.counts.own_positions)),
    Column("loss error", lambda part: _loss_text(part, part.probe.loss_error)),
    Column("limit", lambda part: _loss_text(part, part.probe.loss_limit)),
)
