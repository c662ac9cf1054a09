"""Whether sequence parallelism trained what data parallelism trains, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.answers.verdict import Verdict
from analysis.cells.equivalence import FACTOR, LEAST_FALL, Compared, Comparison
from analysis.labels import count_label
from bench.record import Role


def with_equivalence(found: Verdict, comparisons: Sequence[Comparison]) -> Verdict:
    """The verdict on what trained the same, where trainings were compared: nobody asked for their speed."""
    if not comparisons:
        return found
    return replace(found, answer=_answer(comparisons), details=[], certainty="", to_decide=None)


def equivalence_line(comparison: Comparison) -> str:
    """What one comparison found."""
    return " ".join(_sentences(comparison))


def _answer(comparisons: Sequence[Comparison]) -> str:
    """Of all comparisons in one sentence; those that found something else each in theirs."""
    other = [each for each in comparisons if not is_as_expected(each)]
    if other:
        return " ".join(f"{each.name}: {equivalence_line(each)}" for each in other)
    sound = [row for each in comparisons for row in each.rows if row.training.role == Role.CELL]
    largest = max((max(row.noise.loss, row.noise.grad_norm) for row in sound), default=0.0)
    return (
        f"{count_label(len(sound), 'training')} in {count_label(len(comparisons), 'comparison')} trained what"
        f" data parallelism trains, at most {largest:.2g} times the noise floor away (limit {FACTOR:g}); all"
        " known mistakes that were made lie beyond."
    )


def is_as_expected(comparison: Comparison) -> bool:
    """Whether what is compared is within the noise and every mistake beyond it, on a loss that fell."""
    rows_are = all(row.is_as_expected for row in comparison.rows)
    return rows_are and not _missing(comparison) and comparison.fall >= LEAST_FALL


def _sentences(comparison: Comparison) -> list[str]:
    rows = comparison.rows
    sound = [row for row in rows if row.training.role == Role.CELL]
    within = [row for row in sound if row.is_within]
    told = [_within(within, comparison)] if within else []
    told += [f"{_name(row)} trains something else: {row.departure}." for row in sound if not row.is_within]
    told += _mistakes([row for row in rows if row.training.role == Role.MISTAKE])
    if comparison.fall < LEAST_FALL:
        told.append(
            f"The loss fell by {comparison.fall:.2f} nats only, under {LEAST_FALL:g}: that shows little of"
            " what was learnt; train more steps, or with a larger optimizer.learning_rate."
        )
    missing = _missing(comparison)
    return [*told, f"Without steps: {', '.join(missing)}."] if missing else told


def _within(rows: Sequence[Compared], comparison: Comparison) -> str:
    """Who trained the same, and how nearly."""
    names = ", ".join(dict.fromkeys(map(_name, rows)))
    mean, norm = max(row.mean_loss for row in rows), max(row.max_grad_norm for row in rows)
    largest = max(max(row.noise.loss, row.noise.grad_norm) for row in rows)
    controls = count_label(len(comparison.controls), "control")
    return (
        f"{names} trained what data parallelism trains: over {comparison.steps} steps, in which the loss fell"
        f" by {comparison.fall:.2f} nats, losses are {mean:.1e} nats apart on average and gradient norms"
        f" {norm:.1e} at most; at most {largest:.2g} times the noise floor of {controls} (limit {FACTOR:g})."
    )


def _mistakes(rows: Sequence[Compared]) -> list[str]:
    if not rows:
        return []
    missed = ", ".join(str(row.training.setting("mistake")) for row in rows if row.is_within)
    if missed:
        return [f"Of {count_label(len(rows), 'known mistake')} these would pass for noise here: {missed}."]
    nearest = min(max(row.noise.loss, row.noise.grad_norm) for row in rows)
    found = f"{count_label(len(rows), 'known mistake')}, made on purpose, left the noise behind"
    return [f"{found}, the smallest at {nearest:.2g} times the floor."]


def _missing(comparison: Comparison) -> list[str]:
    return [
        f"{each.setting('strategy')} ({each.record['status']})"
        for each in comparison.without_steps
        if each.record["status"] != "unsupported"
    ]


def _name(row: Compared) -> str:
    return row.training.label
