"""Section of `experiment=loss_equivalence`: comparisons with data parallelism, and published differences."""

from __future__ import annotations

from typing import NamedTuple

from analysis.answers.loss_agreement import FLOOR_READING, equivalence_line, is_as_expected
from analysis.cells.equivalence import ComparedTraining, LossComparison
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.record.record import Role

READING = (
    "Loss: sum of token losses over the number of valid tokens. Distances are from data parallelism."
    f" {FLOOR_READING} In step s the distance may be the square root of s times as large, because rounding"
    " errors add up like a random walk."
)
POST = "DP=4 against SP=4, 20 steps on 4 GPUs; Hugging Face, ulysses-sp.md, revision 5feb9948 of 2026-03-09"


class PublishedDifference(NamedTuple):
    """Published difference between the losses of DP=4 and SP=4, in nats."""

    run: str
    mean: str
    largest: str


PUBLISHED = (
    PublishedDifference("Trainer, logged loss", "0.0054", "0.0131"),
    PublishedDifference("SFTTrainer, logged loss", "0.0811", "0.0812"),
    PublishedDifference("SFTTrainer, sum of token losses over valid tokens", "0.000004", "0.000005"),
)
PUBLISHED_COLUMNS = (
    Column("published run", lambda row: str(row.run), is_words=True),
    Column("mean (nats)", lambda row: str(row.mean)),
    Column("largest (nats)", lambda row: str(row.largest)),
)


def loss_equivalence_section(findings: Findings) -> Section | None:
    """Return a table for each comparison, then one of published differences; None without comparisons."""
    if not findings.comparisons:
        return None
    published = Table.from_items(PUBLISHED_COLUMNS, PUBLISHED)
    parts = [
        *map(_comparison_part, findings.comparisons),
        Section("Published loss differences", (), published, f"{READING} Published: {POST}."),
    ]
    return Section("Loss equivalence", parts=parts, prints_lines=True, answers=True)


def _comparison_part(comparison: LossComparison) -> Section:
    """Return the table of a comparison, and its sentences unless the answer of the report has them."""
    lines = [equivalence_line(comparison)] if is_as_expected(comparison) else []
    return Section(comparison.name, lines, Table.from_items(COLUMNS, comparison.rows))


def _logged_distance(row: ComparedTraining) -> str:
    return "" if row.logged is None else f"{row.logged.mean:.1e} / {row.logged.largest:.1e}"


def _outcome(row: ComparedTraining) -> str:
    if row.training.role == Role.INJECTED_FAULT:
        return "not found" if row.is_within else "found"
    return "equivalent" if row.is_within else "different"


COLUMNS = (
    Column("training", lambda row: str(row.training.label), is_words=True),
    Column("loss distance: mean (nats)", lambda row: f"{row.mean_loss_difference:.1e}"),
    Column("largest (nats)", lambda row: f"{row.max_loss_difference:.1e}"),
    Column("gradient norm distance: largest (relative)", lambda row: f"{row.max_norm_difference:.1e}"),
    Column(
        "multiple of the noise floor (loss / norm)",
        lambda row: f"{row.distance.loss:.2g} / {row.distance.grad_norm:.2g}",
    ),
    Column("logged loss distance: mean / largest (nats)", _logged_distance),
    Column("outcome", _outcome, is_words=True),
    Column("first difference", lambda row: row.departure or "", is_words=True),
)
