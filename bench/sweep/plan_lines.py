"""A forecast in words: a few lines before a sweep, or the whole plan that `--plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.cell.run import RUNS
from bench.command import tool_words
from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.environment import Machine
from bench.labels import duration_label, length_label, size_label
from bench.request.choices import Raw
from bench.sweep.expected import OTHER_CPU
from bench.sweep.forecast import INTERVAL_STEPS, CellForecast, Forecast
from bench.sweep.picks import all_picks, picked_lines, placed_line
from bench.sweep.progress import CellLabels

HEAD = ("cell", "ranks", "step", "timed", "whole cell", "memory of a rank", "of", "fit")
UNKNOWN = "unknown"


def _calibrate() -> str:
    measures = f"{tool_words('bench.calibrate')} --output FILE.yaml measures this machine"
    return f"{measures}; then hardware=calibrated hardware.path=FILE.yaml"


def short_lines(forecast: Forecast) -> list[str]:
    """What a sweep says before its first cell: how long, what is skipped, and what would buy more."""
    if not any(each.runs for each in forecast.cells):
        return []
    first = "" if forecast.plan.grow is None else " for these first cells"
    lines = [f"expected: {forecast.duration}{first}{_by(forecast)}; --plan lists every cell and runs none"]
    illegal = {each.cell.cell_id for each in forecast.illegal}
    if illegal:
        reasons = {str(each.reason) for each in forecast.illegal}
        more = f"; {len(reasons) - 1} more reasons: --plan" if len(reasons) > 1 else ""
        lines.append(f"{_cells(len(illegal))} cannot run and will be unsupported: {min(reasons)}{more}")
    return [*lines, *_advice(forecast), *_too_long(forecast)]


def whole_plan(forecast: Forecast, raws: Sequence[Raw], machine: Machine) -> list[str]:
    """All that is known of a plan: what was picked, its cells in order, what they take, what to change."""
    planned = len(forecast.plan.cells)
    done = max(0, planned - len(forecast.cells))
    already = f", {done} of them done" if done else ""
    return [
        f"plan of {_cells(planned)}{already}{_further(forecast)}: nothing runs, nothing is written",
        *_picked(raws, [each.cell for each in forecast.plan.cells], machine),
        *_table(forecast),
        *_illegal(forecast),
        *_times(forecast),
        *_notes(forecast, raws, machine),
        *_section("advice", [*_advice(forecast), *_too_long(forecast)]),
    ]


def _further(forecast: Forecast) -> str:
    return "" if forecast.plan.grow is None else ", the first ones, and further ones by their records"


def _picked(raws: Sequence[Raw], cells: Sequence[RunConfig], machine: Machine) -> list[str]:
    placed = sorted({placed_line(cell) for cell in cells})
    picks = [f"{value}: {why}" for value, why in all_picks(raws, cells, machine)]
    return [*_section("what runs where", placed), *_section("picked where the request says auto", picks)]


def _table(forecast: Forecast) -> list[str]:
    labels = CellLabels(each.cell for each in forecast.cells)
    rows = [
        (f"reference {_label(cell)}", *_reference(cell, forecast.reference_s(cell)))
        for cell in forecast.references
    ]
    rows += [_row(each, labels) for each in forecast.cells]
    return _section("cells, in the order in which they run", _aligned([HEAD, *rows]))


def _row(each: CellForecast, labels: CellLabels) -> tuple[str, ...]:
    cell = each.cell
    repeat = f" repeat {each.planned.repeat + 1}" if each.planned.repeat else ""
    name, ranks = f"{labels.of(cell)}{repeat}", str(cell.cluster.world_size)
    if each.reason is not None:
        return (name, ranks, *[""] * 5, "unsupported")
    step = UNKNOWN if each.step is None else _seconds(each.step.seconds)
    timed = "" if each.timed_steps is None else _steps(each.timed_steps)
    whole = "predicted" if cell.mode not in RUNS else _duration(each)
    return (name, ranks, step, timed if whole != "predicted" else "", whole, *_room(each))


def _room(each: CellForecast) -> tuple[str, str, str]:
    if each.room is None:
        return (UNKNOWN, "", UNKNOWN)
    low, high = (size_label(round(size)) for size in (each.room.needed.low, each.room.needed.high))
    return (f"{low} to {high}", size_label(each.room.usable), FITS[each.room.fit])


FITS = {Fit.FITS: "fits", Fit.UNDECIDED: "undecided", Fit.OUT_OF_MEMORY: "does not fit"}


def _reference(cell: RunConfig, took_s: float) -> tuple[str, ...]:
    return (str(cell.cluster.world_size), "", "", duration_label(took_s), "", "", "")


def _illegal(forecast: Forecast) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    labels = CellLabels(each.cell for each in forecast.cells)
    for each in forecast.illegal:
        by_reason.setdefault(str(each.reason), []).append(labels.of(each.cell))
    lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items()]
    return _section("cannot run: each becomes an unsupported record", lines)


def _times(forecast: Forecast) -> list[str]:
    """How long it takes, where the times come from, and what may come on top."""
    lines = [f"steps by {basis}" for basis in forecast.bases]
    if any(each.runs for each in forecast.cells):
        parts = "start, checks, warm-up, timed and traced steps"
        lines.insert(0, f"{forecast.duration} for one process of each cell: {parts}")
    instead_s = forecast.measured_instead_s
    if instead_s is not None:
        there = f"to measure them there takes about {duration_label(instead_s)}"
        lines.append(f"predicted cells are arithmetic; {there}")
    if any(each.step is None for each in forecast.cells if each.reason is None):
        lines.append("steps of the other cells are unknown: no figures of their kernel, data or hardware")
        lines.append(_calibrate())
    elif OTHER_CPU in forecast.bases:
        where = "results/reference/accuracy/hardware.yaml"
        lines.append(f"that CPU is two cores of an AMD EPYC ({where}); this one may take a multiple of it")
        lines.append(_calibrate())
    return _section("time", [*lines, *_repeats(forecast)])


def _repeats(forecast: Forecast) -> Iterator[str]:
    """Those that depend on what the first processes take."""
    if forecast.plan.note is not None:
        yield forecast.plan.note
    for seq_len, more in sorted(forecast.repeats.items()):
        at, took = length_label(seq_len), duration_label(more.lacks * more.took_s)
        if more.gets:
            yield f"expected after that at {at}: {more.gets} more of each cell, {took}"
        else:
            yield f"expected after that at {at}: none, as {more.lacks} more of each cell take {took}"


def _notes(forecast: Forecast, raws: Sequence[Raw], machine: Machine) -> list[str]:
    """What was left out, and what needs more memory than there is."""
    told = picked_lines(raws, [each.cell for each in forecast.plan.cells], machine)
    return _section("notes", [note for note in forecast.plan.notes if note not in told])


def _advice(forecast: Forecast) -> list[str]:
    advice = forecast.advice
    if advice is None:
        return []
    lack = f"{_cells(advice.gain)} will have fewer than {INTERVAL_STEPS} timed steps and so no interval"
    words = f"measure.budget_s={advice.budget_s}"
    if advice.timeout_s is not None:
        words += f" measure.timeout_s={advice.timeout_s}"
    took = f"about {duration_label(advice.total_s)} instead of {duration_label(forecast.total_s)}"
    return [f"{lack}; {words} gives every cell {INTERVAL_STEPS}, in {took}"]


def _too_long(forecast: Forecast) -> list[str]:
    late = {each.cell.cell_id: each for each in forecast.cells if each.is_too_long}
    if not late:
        return []
    longest_s = max(each.cell_s for each in late.values() if each.cell_s is not None)
    timeout_s = min(each.cell.measure.timeout_s for each in late.values())
    end = f"will not be done within measure.timeout_s={timeout_s:g}, and so timed_out"
    way_out = f"one takes about {duration_label(longest_s)}; write a larger measure.timeout_s"
    return [f"{_cells(len(late))} {end}: {way_out}"]


def _by(forecast: Forecast) -> str:
    return f" by {' and '.join(forecast.bases)}" if forecast.bases else ""


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _label(cell: RunConfig) -> str:
    return f"{cell.strategy} {length_label(cell.seq_len)}"


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else duration_label(seconds)  # noqa: PLR2004  as duration_label


def _duration(each: CellForecast) -> str:
    if each.ends_early:
        return "not counted"
    return UNKNOWN if each.cell_s is None else duration_label(each.cell_s)
