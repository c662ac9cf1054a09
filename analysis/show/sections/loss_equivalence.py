"""The section of `experiment=loss_equivalence`: trainings next to data parallelism, and published numbers."""

from __future__ import annotations

from analysis.answers.loss_agreement import FLOOR_READING, equivalence_line, is_as_expected
from analysis.cells.equivalence import Compared, Comparison
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.record.record import Role

READING = (
    f"Loss: sum of token losses over the number of valid tokens. {FLOOR_READING} A later step may be the root"
    " of its number times as far off, because rounding adds up like a random walk."
)
POST = "DP=4 against SP=4, 20 steps on 4 GPUs; Hugging Face, ulysses-sp.md, revision 5feb9948 of 2026-03-09"
PUBLISHED = (
    ("Trainer, logged loss", "0.0054", "0.0131"),
    ("SFTTrainer, logged loss", "0.0811", "0.0812"),
    ("SFTTrainer, sum of token losses over valid tokens", "0.000004", "0.000005"),
)
"""Differences between losses that others published, in the order of PUBLISHED_COLUMNS."""
PUBLISHED_COLUMNS = (
    Column("published", lambda row: str(row[0]), is_words=True),
    Column("mean (nats)", lambda row: str(row[1])),
    Column("most (nats)", lambda row: str(row[2])),
)


def loss_equivalence(findings: Findings) -> Section | None:
    """Return each comparison with its table, then the published differences."""
    if not findings.comparisons:
        return None
    published = Table.of(PUBLISHED_COLUMNS, PUBLISHED)
    parts = [
        *map(_part, findings.comparisons),
        Section("Published loss differences", (), published, f"{READING} Published: {POST}."),
    ]
    return Section("Loss equivalence", parts=parts, prints_lines=True, answers=True)


def _part(comparison: Comparison) -> Section:
    """Return one comparison; the answer says it of one that found something else."""
    lines = [equivalence_line(comparison)] if is_as_expected(comparison) else []
    return Section(comparison.name, lines, Table.of(COLUMNS, comparison.rows))


def _logged(row: Compared) -> str:
    return "" if row.logged is None else f"{row.logged[0]:.1e} / {row.logged[1]:.1e}"


def _outcome(row: Compared) -> str:
    if row.training.role == Role.INJECTED_FAULT:
        return "passes for noise" if row.is_within else "found"
    return "same" if row.is_within else "other"


COLUMNS = (
    Column("training", lambda row: str(row.training.label), is_words=True),
    Column("loss apart: mean (nats)", lambda row: f"{row.mean_loss:.1e}"),
    Column("most", lambda row: f"{row.max_loss:.1e}"),
    Column("gradient norm: most, relative", lambda row: f"{row.max_grad_norm:.1e}"),
    Column("times the floor (loss / norm)", lambda row: f"{row.noise.loss:.2g} / {row.noise.grad_norm:.2g}"),
    Column("logged loss apart: mean / most", _logged),
    Column("outcome", _outcome, is_words=True),
    Column("first departure", lambda row: row.departure or "", is_words=True),
)
