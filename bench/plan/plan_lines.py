"""Text of a forecast: the lines printed before a sweep, and the table and notes that `--plan` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.common.labels import duration_label, size_label, value_label
from bench.config import Cell
from bench.cost.band import Fit
from bench.plan.auto_choices import chosen_value, keys_at_auto
from bench.plan.cell_labels import CellLabels, setting_label
from bench.plan.forecast import CellForecast, Forecast
from bench.plan.planned import MemoryRoom
from bench.plan.repeats import planned_lines
from bench.request.choices import Raw

HEADINGS = ("cell", "automatic choices", "steps", "time", "memory", "fit")
NARROW_WIDTH = 100
"""Smallest width of a terminal at which the table has the column `steps`."""
FOLDED_COLUMNS = frozenset({"cell", "automatic choices"})
"""Columns that are folded into several lines in a narrow terminal."""
SHORT_KEYS = {"cluster.world_size": "ranks", "cluster.threads_per_rank": "threads"}
"""Short names of long keys in the table."""
ALWAYS_NAMED = ("engine", "dtype", "trainer")
"""Choices that every plan states, because speeds depend on them."""
UNLIMITED = 10_000
"""Width in characters without a terminal."""
MAX_NAMED = 3
"""Largest number of cells that a memory warning names."""
UNKNOWN = "unknown"
FIT_LABELS = {Fit.FITS: "fits", Fit.UNDECIDED: "undecided", Fit.OUT_OF_MEMORY: "does not fit"}
FIT_WARNINGS: Mapping[Fit, str] = {
    Fit.OUT_OF_MEMORY: "predicted to run out of memory",
    Fit.UNDECIDED: "may run out of memory",
}
RUNS_ANYWAY = "tried anyway, as out_of_memory is a valid result"
SHARED_MEMORY = (
    "CPU ranks share this host's memory; cluster.memory_limit_gib=... ends a rank before the host runs out of"
    " memory"
)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Row of the table: a text for each of HEADINGS."""

    cell: str
    choices: str = ""
    steps: str = ""
    time: str = ""
    memory: str = ""
    fit: str = ""


def short_lines(forecast: Forecast) -> list[str]:
    """Return the lines before a sweep: its expected time, and warnings about cells that may not run or end.

    The list is empty if no cell starts ranks.
    """
    if not any(entry.runs for entry in forecast.cells):
        return []
    part = "" if forecast.plan.choose_cells is None else ", for the first cells"
    lines = [f"expected: {forecast.duration}{part}; --plan lists every cell and runs none"]
    illegal = {entry.cell.cell_id for entry in forecast.illegal}
    if illegal:
        reasons = {str(entry.reason) for entry in forecast.illegal}
        more = f"; --plan shows {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
        lines.append(f"{_cell_count(len(illegal))} cannot run and will be unsupported: {min(reasons)}{more}")
    return [*lines, *_repeat_lines(forecast), *_memory_warnings(forecast), *_timeout_lines(forecast)]


def whole_plan(
    forecast: Forecast, requests: Sequence[Raw], more: Iterable[str] = (), width: int = UNLIMITED
) -> list[str]:
    """Return the lines of `--plan`: a table of all cells in order, and notes below it that end with `more`.

    The table is at most `width` characters wide.
    """
    done_count = len(_finished_cells(forecast))
    done = f", {done_count} of them done" if done_count else ""
    further = "" if forecast.plan.choose_cells is None else ", to which records will add further cells"
    reasons = dict.fromkeys(reason for entry in forecast.cells if (reason := _reason_text(entry)))
    numbers = {reason: f"[{number}]" for number, reason in enumerate(reasons, 1)}
    table = _table(_rows(forecast, requests, numbers), width)
    notes = [*(f"{number} {reason}" for reason, number in numbers.items()), *_time_lines(forecast)]
    notes += [*_common_lines(forecast, requests), *forecast.plan.notes]
    notes += [*_fit_lines(forecast), *_timeout_lines(forecast), *more]
    count = _cell_count(len(forecast.plan.cells))
    return [f"plan of {count}{done}{further}: nothing runs, nothing is written", "", *table, "", *notes]


def _finished_cells(forecast: Forecast) -> list[tuple[Cell, int]]:
    """Return the planned cells that are not pending, because they have a final record, with their repeats."""
    pending = {(entry.cell.cell_id, entry.planned.repeat) for entry in forecast.cells}
    planned = ((entry.cell, entry.repeat) for entry in forecast.plan.cells)
    return [(cell, repeat) for cell, repeat in planned if (cell.cell_id, repeat) not in pending]


def _rows(forecast: Forecast, requests: Sequence[Raw], numbers: Mapping[str, str]) -> list[PlanRow]:
    """Return the rows of finished cells, references and pending cells; `numbers` has a mark per reason."""
    planned = [entry.cell for entry in forecast.plan.cells]
    labels = CellLabels([*planned, *(entry.cell for entry in forecast.cells)])
    _, keys = _shared_and_differing(requests, planned)
    rows = [
        PlanRow(_cell_name(labels, cell, repeat), _chosen_values(keys, cell), time="done")
        for cell, repeat in _finished_cells(forecast)
    ]
    references = CellLabels(forecast.references)
    rows += [
        PlanRow(f"reference {references.label(cell)}", time=duration_label(forecast.reference_s(cell)))
        for cell in forecast.references
    ]
    return [*rows, *(_pending_row(entry, labels, keys, numbers) for entry in forecast.cells)]


def _pending_row(
    entry: CellForecast, labels: CellLabels, keys: Sequence[str], numbers: Mapping[str, str]
) -> PlanRow:
    name = _cell_name(labels, entry.cell, entry.planned.repeat)
    number = numbers.get(_reason_text(entry), "")
    if entry.reason is not None:
        return PlanRow(name, _chosen_values(keys, entry.cell), fit=f"unsupported {number}")
    return PlanRow(
        name,
        _chosen_values(keys, entry.cell),
        steps=UNKNOWN if entry.step is None else f"{entry.timed_steps} x {_step_label(entry.step.seconds)}",
        time=UNKNOWN if entry.cell_s is None else duration_label(entry.cell_s),
        memory=UNKNOWN if entry.room is None else entry.room.needed_label,
        fit=UNKNOWN if entry.room is None else f"{FIT_LABELS[entry.room.fit]} {number}".rstrip(),
    )


def _table(rows: Sequence[PlanRow], width: int) -> list[str]:
    """Return the lines of the table, without columns that are empty in every row."""
    texts = zip(HEADINGS, *map(astuple, rows), strict=True)
    columns = {heading: column for heading, *column in texts if any(column)}
    if width < NARROW_WIDTH:
        columns.pop("steps", None)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(heading, no_wrap=heading not in FOLDED_COLUMNS, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=width)
    with console.capture() as drawn:
        console.print(table)
    return [line.rstrip() for line in drawn.get().splitlines()]


def _cell_name(labels: CellLabels, cell: Cell, repeat: int) -> str:
    return f"{labels.label(cell)} repeat {repeat + 1}" if repeat else labels.label(cell)


def _shared_and_differing(requests: Sequence[Raw], cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    """Return the keys at `auto` whose value is the same in all cells, and those whose value differs.

    The key sp_degree is in neither list, because the label of a cell shows it.
    """
    keys = [key for key in keys_at_auto(requests) if key != "sp_degree"]
    differing = [key for key in keys if len({chosen_value(key, cell) for cell in cells}) > 1]
    return [key for key in keys if key not in differing], differing


def _chosen_values(keys: Sequence[str], cell: Cell) -> str:
    values = {SHORT_KEYS.get(key, key.removesuffix(".name")): chosen_value(key, cell) for key in keys}
    return " ".join(setting_label(key, value) for key, value in values.items() if value is not None)


def _reason_text(entry: CellForecast) -> str:
    """Return the reason why a cell cannot run, or may not fit in memory; an empty text if there is none."""
    if entry.reason is not None or entry.room is None or entry.room.fit is Fit.FITS:
        return entry.reason or ""
    return f"a rank may use {size_label(entry.room.usable)} and needs most for {entry.room.largest}"


def _time_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the total time with its source, the repeats that may be added, and warnings about the times."""
    if any(entry.reason is None for entry in forecast.cells):
        prefix = "measuring these cells would take" if forecast.is_predicted else "time:"
        yield f"{prefix} {forecast.duration}"
    yield from _repeat_lines(forecast)
    if any(entry.step is None for entry in forecast.cells if entry.reason is None):
        yield "unknown times: no file of conf/hardware/ has rates of the cells' kernel, data or device"
    steps = (entry.step for entry in forecast.cells if entry.step is not None)
    yield from dict.fromkeys(step.caveat for step in steps if step.caveat is not None)


def _repeat_lines(forecast: Forecast) -> list[str]:
    """Return the lines on the repeats that a new sweep will probably add."""
    if not forecast.repeats:
        return []
    budget_s = forecast.repeats[0].cells[0].measure.repeats_budget_s
    return planned_lines(forecast.repeats, forecast.total_s, budget_s)


def _common_lines(forecast: Forecast, requests: Sequence[Raw]) -> Iterator[str]:
    """Yield lines on the choices that all cells have in common, which the table leaves out."""
    cells = [entry.cell for entry in forecast.plan.cells]
    shared_keys, _ = _shared_and_differing(requests, cells)
    values = {key.removesuffix(".name"): chosen_value(key, cells[0]) for key in shared_keys}
    chosen = {key: value for key, value in values.items() if key not in ALWAYS_NAMED and value is not None}
    yield f"cells run with {' '.join(f'{key}={_distinct_values(cells, key)}' for key in ALWAYS_NAMED)}"
    if chosen:
        choices = " ".join(f"{key}={value_label(value)}" for key, value in chosen.items())
        yield f"automatic choices in all cells: {choices}"
    if any(cell.cluster.ranks_per_gpu > 1 for cell in cells):
        yield "ranks share GPUs: such cells check results, and their times mean nothing"


def _distinct_values(cells: Sequence[Cell], key: str) -> str:
    return " and ".join(dict.fromkeys(str(cell.flat()[key]) for cell in cells))


def _fit_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the memory that a rank may use, the references that do not run, and warnings about memory."""
    rooms = [entry.room for entry in forecast.cells if entry.room is not None]
    limits = dict.fromkeys(f"{size_label(room.usable)} ({_device_label(room)})" for room in rooms)
    if limits:
        yield f"memory that a rank may use: {', '.join(limits)}"
    yield from forecast.skipped_references
    yield from _memory_warnings(forecast)


def _device_label(room: MemoryRoom) -> str:
    return (
        f"{room.cell.hardware}, ranks={len(room.cell.running_ranks)}" if room.is_share else room.cell.hardware
    )


def _memory_warnings(forecast: Forecast) -> Iterator[str]:
    """Yield a line for the cells that will run out of memory, and a line for the cells that may."""
    for fit, warning in FIT_WARNINGS.items():
        cells = {e.cell.cell_id: e.cell for e in forecast.cells if e.runs and e.room and e.room.fit is fit}
        if cells:
            labels = CellLabels(entry.cell for entry in forecast.cells)
            names = ", ".join(map(labels.label, [*cells.values()][:MAX_NAMED]))
            names += ", ..." if len(cells) > MAX_NAMED else ""
            yield f"{_cell_count(len(cells))} {warning} ({names}): {RUNS_ANYWAY}"
    rooms = [entry.room for entry in forecast.cells if entry.runs and entry.room is not None]
    if any(room.is_share and room.fit is not Fit.FITS for room in rooms):
        yield SHARED_MEMORY


def _timeout_lines(forecast: Forecast) -> Iterator[str]:
    late = {entry.cell.cell_id: entry for entry in forecast.cells if entry.exceeds_timeout}
    if late:
        longest_s = max(entry.cell_s for entry in late.values() if entry.cell_s is not None)
        timeout_s = min(entry.cell.measure.timeout_s for entry in late.values())
        yield (
            f"{_cell_count(len(late))} will not be done within measure.timeout_s={timeout_s:g} and therefore"
            f" end as timed_out; the longest takes about {duration_label(longest_s)}, so write a larger"
            " measure.timeout_s"
        )


def _cell_count(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _step_label(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else duration_label(seconds)  # noqa: PLR2004  as duration_label
