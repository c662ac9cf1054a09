"""States in sentences whether trainings with sequence parallelism match data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.answers.verdict import Verdict
from analysis.answers.wording import join_words
from analysis.cells.equivalence import ComparedTraining, LossComparison
from analysis.labels import count_label
from bench.record.record import Role, Status
from bench.record.trajectory_noise import FALSE_ALARMS, MIN_NOISE_FACTOR

MIN_CONTROLS = 3
"""Smallest number of controls whose spread is an estimate of the noise."""
MIN_LOSS_FALL = 0.5
"""Smallest fall of the loss, in nats; a loss that hardly falls hardly shows what was learnt."""
CROSSED_BY_CHANCE = f"which equivalent trainings cross in {FALSE_ALARMS * 100:g} % of comparisons"
FLOOR_READING = (
    "Noise floor: distance of plain data parallelism and its controls, which do the same work in another way,"
    " from their mean (root mean square), times a factor from the F distribution. If all trainings are"
    " equivalent, any of the compared ones crosses the floor, in loss or gradient norm, in at most"
    f" {FALSE_ALARMS * 100:g} % of comparisons. The factor is at least {MIN_NOISE_FACTOR:g}. The distance is"
    " at least one rounding of float32 in every step."
)


def with_equivalence(verdict: Verdict, comparisons: Sequence[LossComparison], *, alone: bool) -> Verdict:
    """Return the verdict, with sentences on the compared trainings in front of its answer.

    Args:
        verdict: verdict on the cells' speeds.
        comparisons: trainings compared with data parallelism; without any, the verdict is returned unchanged.
        alone: whether all records are of `experiment=loss_equivalence`. The question is then not their speed,
            so sentences on speed are removed.
    """
    if not comparisons:
        return verdict
    answer = _answer(comparisons)
    if not alone:
        return replace(verdict, answer=f"{answer} {verdict.answer}")
    return replace(verdict, answer=answer, details=[], certainty="", to_decide=None, shares=[])


def equivalence_line(comparison: LossComparison) -> str:
    """Return the outcome of one comparison in sentences."""
    return " ".join(_sentences(comparison))


def _answer(comparisons: Sequence[LossComparison]) -> str:
    """Return sentences on all comparisons together, or on each comparison that is not as expected."""
    unexpected = [comparison for comparison in comparisons if not is_as_expected(comparison)]
    if unexpected:
        return " ".join(f"{comparison.name}: {equivalence_line(comparison)}" for comparison in unexpected)
    rows = [row for comparison in comparisons for row in comparison.rows if row.training.role == Role.CELL]
    largest = max((row.largest_distance for row in rows), default=0.0)
    return (
        f"{count_label(len(rows), 'training')} in {count_label(len(comparisons), 'comparison')} matched data"
        f" parallelism. The largest deviation is {largest:.2g} times the noise floor, {CROSSED_BY_CHANCE}."
        " Every known mistake that was injected lies beyond the floor."
    )


def is_as_expected(comparison: LossComparison) -> bool:
    """Return whether trainings are within the noise, mistakes beyond it, and the loss fell enough to tell."""
    are_rows_as_expected = all(row.is_as_expected for row in comparison.rows)
    return are_rows_as_expected and not [*_names_without_steps(comparison), *_shortcomings(comparison)]


def _sentences(comparison: LossComparison) -> list[str]:
    rows = comparison.rows
    matching = [row for row in rows if row.training.role == Role.CELL and row.is_as_expected]
    sentences = [_match_text(matching, comparison)] if matching else []
    sentences += [
        _mismatch_sentence(row)
        for row in rows
        if not row.is_as_expected and row.training.role != Role.INJECTED_FAULT
    ]
    sentences += _mistake_sentences([row for row in rows if row.training.role == Role.INJECTED_FAULT])
    without_steps = _names_without_steps(comparison)
    if without_steps:
        sentences.append(f"These trainings have no steps to compare: {', '.join(without_steps)}.")
    return [*sentences, *_shortcomings(comparison)]


def _mismatch_sentence(row: ComparedTraining) -> str:
    """Return a sentence on how a training differs from data parallelism, or why it does not count."""
    if row.departure is not None:
        return f"{row.training.label} does not match data parallelism: {row.departure}."
    reason = str(row.training.record.reason).rstrip(".")
    return f"{row.training.label} ended as {row.training.record.status} and does not count: {reason}."


def _shortcomings(comparison: LossComparison) -> list[str]:
    """Return the reasons why a comparison says little, even if all trainings match."""
    sentences = []
    roles = [row.training.role for row in comparison.rows]
    if Role.CELL not in roles:
        sentences.append("Nothing was compared, because no training with sequence parallelism ran.")
    if Role.INJECTED_FAULT not in roles:
        sentences.append("No known mistake was injected, so nothing shows that one would be found.")
    controls = min(comparison.control_counts)
    if controls < MIN_CONTROLS:
        sentences.append(
            f"Only {count_label(controls, 'control')} succeeded; an estimate of the noise needs at least"
            f" {MIN_CONTROLS}."
        )
    if comparison.fall < MIN_LOSS_FALL:
        sentences.append(
            f"The loss fell by only {comparison.fall:.2f} nats; a fall of less than {MIN_LOSS_FALL:g} shows"
            " little of what was learnt. Train more steps, or set a larger optimizer.learning_rate."
        )
    return sentences


def _match_text(rows: Sequence[ComparedTraining], comparison: LossComparison) -> str:
    """Return which trainings match data parallelism, and how closely."""
    names = join_words(dict.fromkeys(row.training.label for row in rows))
    mean = max(row.mean_loss_difference for row in rows)
    norm = max(row.max_norm_difference for row in rows)
    largest = max(row.largest_distance for row in rows)
    controls = count_label(sum(comparison.control_counts), "control")
    return (
        f"{names} matched data parallelism over {comparison.steps} steps, in which the loss fell by"
        f" {comparison.fall:.2f} nats. Losses differ by {mean:.1e} nats on average, gradient norms by"
        f" {norm:.1e} at most. The largest deviation is {largest:.2g} times the noise floor of {controls},"
        f" {CROSSED_BY_CHANCE}."
    )


def _mistake_sentences(rows: Sequence[ComparedTraining]) -> list[str]:
    if not rows:
        return []
    mistakes = count_label(len(rows), "injected mistake")
    missed = ", ".join(str(row.training.setting("inject_fault")) for row in rows if row.is_within)
    if missed:
        return [f"Of {mistakes} these are within the noise and would not be found here: {missed}."]
    nearest = min(row.largest_distance for row in rows)
    were = "was" if len(rows) == 1 else "were"
    return [f"{mistakes} {were} found, the nearest at {nearest:.2g} times the noise floor."]


def _names_without_steps(comparison: LossComparison) -> list[str]:
    return [
        f"{training.setting('strategy')} ({training.record.status})"
        for training in comparison.other_trainings
        if not training.loss and training.record.status is not Status.UNSUPPORTED
    ]
