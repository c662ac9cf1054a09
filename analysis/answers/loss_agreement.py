"""Whether sequence parallelism trained what data parallelism trains, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.answers.verdict import Verdict
from analysis.cells.equivalence import Compared, Comparison
from analysis.labels import count_label
from bench.record.record import Role, Status
from bench.record.trajectory_noise import FALSE_ALARMS, LEAST_FACTOR

LEAST_CONTROLS = 3
"""Fewer controls show too little of the noise."""
LEAST_FALL = 0.5
"""Least fall of the loss, in nats: a loss that hardly falls hardly shows what was learnt."""
CROSSED = f"equivalent ones cross it in {FALSE_ALARMS * 100:g} % of comparisons"
FLOOR_READING = (
    "Floor: how far plain data parallelism and its controls, which do the same work in another way, are from"
    " their mean (root mean square), times a factor by the F distribution: if all trainings are equivalent,"
    " any of those compared crosses it, in either signal, in at most"
    f" {FALSE_ALARMS * 100:g} % of comparisons. The factor is no less than {LEAST_FACTOR:g}, the distance no"
    " less than one rounding of float32 in every step."
)


def with_equivalence(found: Verdict, comparisons: Sequence[Comparison], *, alone: bool) -> Verdict:
    """The verdict with what trained the same; of such trainings `alone` nobody asked for the speed."""
    if not comparisons:
        return found
    answer = _answer(comparisons)
    if not alone:
        return replace(found, answer=f"{answer} {found.answer}")
    return replace(found, answer=answer, details=[], certainty="", to_decide=None, shares=[])


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
        f" data parallelism trains, at most {largest:.2g} times the noise floor away ({CROSSED}); all known"
        " mistakes that were made lie beyond."
    )


def is_as_expected(comparison: Comparison) -> bool:
    """Whether what is compared is within the noise and every mistake beyond it, on a loss that fell."""
    rows_are = all(row.is_as_expected for row in comparison.rows)
    return rows_are and not [*_missing(comparison), *_shortcomings(comparison)]


def _sentences(comparison: Comparison) -> list[str]:
    rows = comparison.rows
    sound = [row for row in rows if row.training.role == Role.CELL]
    same = [row for row in sound if row.is_as_expected]
    told = [_within(same, comparison)] if same else []
    told += [
        _other(row) for row in rows if not row.is_as_expected and row.training.role != Role.INJECTED_FAULT
    ]
    told += _mistakes([row for row in rows if row.training.role == Role.INJECTED_FAULT])
    missing = _missing(comparison)
    told += [f"Without steps: {', '.join(missing)}."] if missing else []
    return [*told, *_shortcomings(comparison)]


def _other(row: Compared) -> str:
    """What a training did that should have been the same."""
    if row.departure is not None:
        return f"{row.training.label} trains something else: {row.departure}."
    reason = str(row.training.record.reason).rstrip(".")
    return f"{row.training.label} is no sound training ({row.training.record.status}): {reason}."


def _shortcomings(comparison: Comparison) -> list[str]:
    """Why a comparison says little, whatever it found."""
    said = []
    roles = [row.training.role for row in comparison.rows]
    if Role.CELL not in roles:
        said.append("Nothing is compared: no sequence parallelism ran.")
    if Role.INJECTED_FAULT not in roles:
        said.append("No known mistake was made, so nothing shows that one would be found.")
    controls = min(comparison.control_counts)
    if controls < LEAST_CONTROLS:
        few = count_label(controls, "control")
        said.append(f"Only {few} ended well, under {LEAST_CONTROLS}: that shows little of the noise.")
    if comparison.fall < LEAST_FALL:
        said.append(
            f"The loss fell by {comparison.fall:.2f} nats only, under {LEAST_FALL:g}: that shows little of"
            " what was learnt; train more steps, or with a larger optimizer.learning_rate."
        )
    return said


def _within(rows: Sequence[Compared], comparison: Comparison) -> str:
    """Who trained the same, and how nearly."""
    names = ", ".join(dict.fromkeys(row.training.label for row in rows))
    mean, norm = max(row.mean_loss for row in rows), max(row.max_grad_norm for row in rows)
    largest = max(max(row.noise.loss, row.noise.grad_norm) for row in rows)
    controls = count_label(sum(comparison.control_counts), "control")
    return (
        f"{names} trained what data parallelism trains: over {comparison.steps} steps, in which the loss fell"
        f" by {comparison.fall:.2f} nats, losses are {mean:.1e} nats apart on average and gradient norms"
        f" {norm:.1e} at most; at most {largest:.2g} times the noise floor of {controls} ({CROSSED})."
    )


def _mistakes(rows: Sequence[Compared]) -> list[str]:
    if not rows:
        return []
    missed = ", ".join(str(row.training.setting("inject_fault")) for row in rows if row.is_within)
    if missed:
        return [f"Of {count_label(len(rows), 'known mistake')} these would pass for noise here: {missed}."]
    nearest = min(max(row.noise.loss, row.noise.grad_norm) for row in rows)
    made = f"{count_label(len(rows), 'known mistake')}, made on purpose"
    return [f"Found: {made}, the nearest at {nearest:.2g} times the floor."]


def _missing(comparison: Comparison) -> list[str]:
    return [
        f"{each.setting('strategy')} ({each.record.status})"
        for each in comparison.others
        if not each.loss and each.record.status is not Status.UNSUPPORTED
    ]
