"""A forecast in words: a few lines before a sweep, or the table and the notes that `--plan` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.common.labels import duration_label, shown, size_label
from bench.config import Cell
from bench.cost.band import Fit
from bench.plan.auto_choices import choice, choices_left_open
from bench.plan.cell_labels import CellLabels, setting
from bench.plan.forecast import INTERVAL_STEPS, CellForecast, Forecast
from bench.plan.planned import Room
from bench.plan.repeats import planned_lines
from bench.request.choices import Raw

HEADINGS = ("cell", "automatic choices", "steps", "time", "memory", "fit")
NARROW = 100
"""A terminal with fewer columns goes without `steps`."""
FOLDED = frozenset({"cell", "automatic choices"})
"""Columns that take several lines where there is little room."""
SHORT = {"cluster.world_size": "ranks", "cluster.threads_per_rank": "threads"}
"""Of long keys, in the table."""
NAMED = ("engine", "dtype", "trainer")
"""Choices that every plan names, chosen or not: speeds depend on them."""
UNLIMITED = 10_000
MOST_NAMED = 3
UNKNOWN = "unknown"
FITS = {Fit.FITS: "fits", Fit.UNDECIDED: "undecided", Fit.OUT_OF_MEMORY: "does not fit"}
PREDICTED: Mapping[Fit, str] = {
    Fit.OUT_OF_MEMORY: "predicted to run out of memory",
    Fit.UNDECIDED: "may run out of memory",
}
RUNS_ANYWAY = "tried anyway, as out_of_memory is a valid result"
SHARED = (
    "CPU ranks share this host's memory; cluster.memory_limit_gib=... ends a rank before the host suffers"
)


def short_lines(forecast: Forecast) -> list[str]:
    """What a sweep says before its first cell: how long, and what cannot run, fit or be timed well."""
    if not any(each.runs for each in forecast.cells):
        return []
    first = "" if forecast.plan.grow is None else ", the first ones"
    lines = [f"expected: {forecast.duration}{first}; --plan lists every cell and runs none"]
    illegal = {each.cell.cell_id for each in forecast.illegal}
    if illegal:
        reasons = {str(each.reason) for each in forecast.illegal}
        more = f"; {len(reasons) - 1} more reasons: --plan" if len(reasons) > 1 else ""
        lines.append(f"{_cells(len(illegal))} cannot run and will be unsupported: {min(reasons)}{more}")
    return [*lines, *_repeats(forecast), *_memory(forecast), *_short(forecast), *_too_long(forecast)]


def whole_plan(
    forecast: Forecast, raws: Sequence[Raw], more: Iterable[str] = (), width: int = UNLIMITED
) -> list[str]:
    """The table of all cells in their order, and below it what is true of several, with `more` notes."""
    done = len(_done(forecast))
    already = f", {done} of them done" if done else ""
    further = "" if forecast.plan.grow is None else ", the first ones, and further ones by their records"
    reasons = dict.fromkeys(reason for each in forecast.cells if (reason := _reason(each)))
    numbers = {reason: f"[{number}]" for number, reason in enumerate(reasons, 1)}
    table = _table(_rows(forecast, raws, numbers), width)
    notes = [*(f"{number} {reason}" for reason, number in numbers.items()), *_time(forecast)]
    notes += [*_common(forecast, raws), *forecast.plan.notes]
    notes += [*_fitting(forecast), *_short(forecast), *_too_long(forecast), *more]
    return [
        f"plan of {_cells(len(forecast.plan.cells))}{already}{further}: nothing runs, nothing is written",
        "",
        *table,
        "",
        *notes,
    ]


def _done(forecast: Forecast) -> list[tuple[Cell, int]]:
    """The planned cells that have a final record already, with their repeats."""
    pending = {(each.cell.cell_id, each.planned.repeat) for each in forecast.cells}
    planned = ((each.cell, each.repeat) for each in forecast.plan.cells)
    return [(cell, repeat) for cell, repeat in planned if (cell.cell_id, repeat) not in pending]


def _rows(forecast: Forecast, raws: Sequence[Raw], numbers: Mapping[str, str]) -> list[tuple[str, ...]]:
    """A row of HEADINGS for each cell: those that are done, references, and those that are to run."""
    planned = [each.cell for each in forecast.plan.cells]
    labels = CellLabels([*planned, *(each.cell for each in forecast.cells)])
    _, choices = _by_difference(raws, planned)
    nothing = ("",) * 2
    rows: list[tuple[str, ...]] = [
        (_name(labels, cell, repeat), _chosen(choices, cell), "", "done", *nothing)
        for cell, repeat in _done(forecast)
    ]
    references = CellLabels(forecast.references)
    for cell in forecast.references:
        took = duration_label(forecast.reference_s(cell))
        rows.append((f"reference {references.of(cell)}", "", "", took, *nothing))
    for each in forecast.cells:
        name = _name(labels, each.cell, each.planned.repeat)
        *expected, fit = _expected(each)
        number = numbers.get(_reason(each), "")
        rows.append((name, _chosen(choices, each.cell), *expected, f"{fit} {number}".rstrip()))
    return rows


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """The columns in which any row has something."""
    columns = {heading: texts for heading, *texts in zip(HEADINGS, *rows, strict=True) if any(texts)}
    if width < NARROW:
        columns.pop("steps", None)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading, no_wrap=heading not in FOLDED, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=width)
    with console.capture() as drawn:
        console.print(table)
    return [line.rstrip() for line in drawn.get().splitlines()]


def _name(labels: CellLabels, cell: Cell, repeat: int) -> str:
    return f"{labels.of(cell)} repeat {repeat + 1}" if repeat else labels.of(cell)


def _by_difference(raws: Sequence[Raw], cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """The choices left open that are the same in all cells, and the others.

    Without sp_degree: a cell's label tells it.
    """
    keys = [key for key in choices_left_open(raws) if key != "sp_degree"]
    differing = [key for key in keys if len({choice(key, cell) for cell in cells}) > 1]
    return [key for key in keys if key not in differing], differing


def _chosen(keys: Sequence[str], cell: Cell) -> str:
    values = {SHORT.get(key, key.removesuffix(".name")): choice(key, cell) for key in keys}
    return " ".join(setting(key, value) for key, value in values.items() if value is not None)


def _expected(each: CellForecast) -> tuple[str, ...]:
    """A cell's timed steps, whole time, memory of a rank, and whether it fits."""
    if each.reason is not None:
        return ("", "", "", "unsupported")
    step = UNKNOWN if each.step is None else f"{each.timed_steps} x {_seconds(each.step.seconds)}"
    time = UNKNOWN if each.cell_s is None else duration_label(each.cell_s)
    if each.room is None:
        return (step, time, UNKNOWN, UNKNOWN)
    return (step, time, each.room.needed_label, FITS[each.room.fit])


def _reason(each: CellForecast) -> str:
    """Why a cell cannot run or may not fit; nothing where it can and does."""
    if each.reason is not None or each.room is None or each.room.fit is Fit.FITS:
        return each.reason or ""
    return f"a rank may use {size_label(each.room.usable)} and needs most for {each.room.largest}"


def _time(forecast: Forecast) -> Iterator[str]:
    """How long it takes and what that rests on, in one line; then what may come on top."""
    if any(each.reason is None for each in forecast.cells):
        what = "measuring these cells would take" if forecast.is_predicted else "time:"
        yield f"{what} {forecast.duration}"
    yield from _repeats(forecast)
    if any(each.step is None for each in forecast.cells if each.reason is None):
        yield "unknown times: no file of conf/hardware/ has rates of the cells' kernel, data or device"
    steps = (each.step for each in forecast.cells if each.step is not None)
    yield from dict.fromkeys(step.caveat for step in steps if step.caveat is not None)


def _repeats(forecast: Forecast) -> list[str]:
    """Return what repeats that were left open will decide."""
    if not forecast.repeats:
        return []
    budget_s = forecast.repeats[0].cells[0].measure.repeats_budget_s
    return planned_lines(forecast.repeats, forecast.total_s, budget_s)


def _common(forecast: Forecast, raws: Sequence[Raw]) -> Iterator[str]:
    """What all cells share, so that the table need not say it."""
    cells = [each.cell for each in forecast.plan.cells]
    same, _ = _by_difference(raws, cells)
    values = {key.removesuffix(".name"): choice(key, cells[0]) for key in same}
    values = {key: value for key, value in values.items() if key not in NAMED}
    chosen = " ".join(f"{key}={shown(value)}" for key, value in values.items() if value is not None)
    named = " ".join(f"{key}={' and '.join(_values(cells, key))}" for key in NAMED)
    yield f"cells run with {named}"
    if chosen:
        yield f"automatic choices in all cells: {chosen}"
    if any(cell.cluster.ranks_per_gpu > 1 for cell in cells):
        yield "ranks share GPUs: such cells show correctness only"


def _values(cells: Sequence[Cell], key: str) -> list[str]:
    """Return the values that a choice has in any of the cells."""
    return [*dict.fromkeys(str(cell.flat()[key]) for cell in cells)]


def _fitting(forecast: Forecast) -> Iterator[str]:
    """What a rank may use, and what becomes of cells that need more."""
    rooms = [each.room for each in forecast.cells if each.room is not None]
    limits = dict.fromkeys(f"{size_label(room.usable)} ({_whose(room)})" for room in rooms)
    if limits:
        yield f"memory that a rank may use: {', '.join(limits)}"
    yield from forecast.not_tried
    yield from _memory(forecast)


def _whose(room: Room) -> str:
    return (
        f"{room.cell.hardware}, ranks={len(room.cell.running_ranks)}" if room.is_share else room.cell.hardware
    )


def _memory(forecast: Forecast) -> Iterator[str]:
    """The cells that run and may not fit, in a line."""
    for fit, what in PREDICTED.items():
        short = {e.cell.cell_id: e.cell for e in forecast.cells if e.runs and e.room and e.room.fit is fit}
        if short:
            labels = CellLabels(each.cell for each in forecast.cells)
            names = ", ".join(map(labels.of, [*short.values()][:MOST_NAMED]))
            names += ", ..." if len(short) > MOST_NAMED else ""
            yield f"{_cells(len(short))} {what} ({names}): {RUNS_ANYWAY}"
    rooms = [each.room for each in forecast.cells if each.runs and each.room is not None]
    if any(room.is_share and room.fit is not Fit.FITS for room in rooms):
        yield SHARED


def _short(forecast: Forecast) -> Iterator[str]:
    if count := forecast.without_interval:
        lack = f"fewer than {INTERVAL_STEPS} timed steps and so no interval"
        yield f"{_cells(count)} will have {lack}; a larger measure.budget_s gives more steps"


def _too_long(forecast: Forecast) -> list[str]:
    late = {each.cell.cell_id: each for each in forecast.cells if each.is_too_long}
    if not late:
        return []
    longest_s = max(each.cell_s for each in late.values() if each.cell_s is not None)
    timeout_s = min(each.cell.measure.timeout_s for each in late.values())
    end = f"will not be done within measure.timeout_s={timeout_s:g}, and so timed_out"
    way_out = f"one takes about {duration_label(longest_s)}; write a larger measure.timeout_s"
    return [f"{_cells(len(late))} {end}: {way_out}"]


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else duration_label(seconds)  # noqa: PLR2004  as duration_label
