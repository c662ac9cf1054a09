"""Trainings beside data parallelism as rows of text, with the published numbers beneath."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.cells.equivalence import Compared, Comparison
from analysis.show.tables.rows import markdown_table
from bench.record.record import Role

HEADINGS = (
    "training", "loss apart: mean (nats)", "most", "gradient norm: most, relative",
    "times the floor (loss / norm)", "logged loss apart: mean / most", "outcome", "first departure",
)  # fmt: skip
PUBLISHED_HEADINGS = ("published", "mean (nats)", "most (nats)")

POST = "DP=4 against SP=4, 20 steps on 4 GPUs; Hugging Face, ulysses-sp.md, revision 5feb9948 of 2026-03-09"
PUBLISHED: Sequence[tuple[str, ...]] = (
    ("Trainer, logged loss", "0.0054", "0.0131"),
    ("SFTTrainer, logged loss", "0.0811", "0.0812"),
    ("SFTTrainer, sum of token losses over valid tokens", "0.000004", "0.000005"),
)
"""Differences between losses that others published, in the order of PUBLISHED_HEADINGS."""


def equivalence_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Every training but the reference, in the order of HEADINGS."""
    return [*map(_row, comparison.rows)]


def equivalence_markdown(comparisons: Sequence[Comparison]) -> str:
    """A table for each comparison, and the published numbers once."""
    parts = [f"### {each.name}\n\n{markdown_table(HEADINGS, equivalence_rows(each))}" for each in comparisons]
    published = markdown_table(PUBLISHED_HEADINGS, PUBLISHED)
    return "\n".join([*parts, f"Published ({POST}):\n\n{published}"])


def _row(row: Compared) -> tuple[str, ...]:
    logged = row.logged
    return (
        row.training.label,
        f"{row.mean_loss:.1e}",
        f"{row.max_loss:.1e}",
        f"{row.max_grad_norm:.1e}",
        f"{row.noise.loss:.2g} / {row.noise.grad_norm:.2g}",
        "" if logged is None else f"{logged[0]:.1e} / {logged[1]:.1e}",
        _outcome(row),
        row.departure or "",
    )


def _outcome(row: Compared) -> str:
    if row.training.role == Role.MISTAKE:
        return "passes for noise" if row.is_within else "found"
    return "same" if row.is_within else "other"
