"""The report's one page: everything the template shows, and the template filled in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis.answers.next_steps import next_steps
from analysis.answers.verdict import Verdict
from analysis.cells.cells import Cells
from analysis.cells.selection import for_pages
from analysis.figures.files import FigureFile
from analysis.frame.archive import Archive
from analysis.frame.load import Record
from analysis.labels import count_label, number_label, status_label
from analysis.metrics.definitions import meanings_of
from analysis.page.cell_facts import cell_facts
from analysis.page.memory_facts import largest_blocks, memory_facts
from analysis.tables.attention import COLUMNS as ATTENTION_COLUMNS
from analysis.tables.attention import HEADINGS as ATTENTION_HEADINGS
from analysis.tables.attention import attention_rows
from analysis.tables.rows import HEADINGS, Row, failure_reasons, rows_of

BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "together")
MAX_VALUES = 4
"""More different values than this are counted, not listed."""
SORTED_BY = (
    "strategy", "seq_len", "cluster.world_size", "status", "tokens_per_s", "n", "step_time_ms",
    "peak_allocated_bytes", "exposed_attention_exchange_share", "exposed_communication_share",
    "traced_to_timed", "speed_up", "note",
)  # fmt: skip
"""The summary's column behind each of HEADINGS."""
RowsBehind = dict[tuple[str, ...], list[int]]
"""Per cell the rows of the archive's frame that its records are."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One record behind a cell, in pairs of name and text."""

    title: str
    facts: list[tuple[str, str]]
    blocks: list[tuple[str, ...]]
    log_tail: str | None


@dataclass(frozen=True, slots=True)
class ShownCell:
    """One row of the table with the records behind it; `settings` are those not shared by all cells.

    `facts` are of the cell as a whole, `values` what the table is sorted by, heading by heading: plain
    numbers or words, empty where missing.
    """

    anchor: str
    cell_id: str
    name: str
    status: str
    row: Row
    values: list[str]
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    attempts: list[Attempt]


def render(
    archive: Archive,
    cells: Cells,
    found: Verdict,
    figure_files: Callable[[], Sequence[FigureFile]],
    figures_note: str | None,
) -> str:
    """The whole page as HTML; it loads nothing from anywhere. Too many cells are not all listed.

    `figure_files` are asked for last, so that figures may still be drawn while the cells are put into words.
    """
    environment = Environment(
        loader=PackageLoader("analysis.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {key: _text(value) for key, value in archive.shared.items()}
    shown = for_pages(cells)
    rows_behind = _rows_behind(archive.frame, shown.cells.frame)
    return environment.get_template("report.html.jinja").render(
        figures=figure_files(),
        subtitle=cells.subtitle,
        banner=cells.banner,
        count=f"{count_label(len(cells), 'cell')}, {count_label(len(archive.frame), 'record')}",
        verdict=found,
        figures_note=figures_note,
        headings=with_meanings(HEADINGS, SORTED_BY),
        block_headings=BLOCK_HEADINGS,
        reasons=failure_reasons(cells),
        next_steps=next_steps(cells),
        cells=shown_cells(archive, shown.cells, rows_behind, shared),
        cells_note=shown.note,
        attention_headings=with_meanings(ATTENTION_HEADINGS, ATTENTION_COLUMNS),
        attention_rows=attention_rows(shown.cells),
        shared=[*shared.items()],
        environment=distinct_values(map(_with_packages, archive.environments)),
    )


def with_meanings(headings: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each heading with what the column behind it means, None where it is no measured quantity."""
    return [*zip(headings, meanings_of(columns), strict=True)]


def shown_cells(
    archive: Archive, shown: Cells, rows_behind: RowsBehind, shared: Mapping[str, str]
) -> list[ShownCell]:
    """The cells, each with its own settings and its records."""
    cells = []
    for number, (identity, name, row) in enumerate(
        zip(_identities(shown.frame), shown.names, rows_of(shown), strict=True)
    ):
        records = [archive.record(row_behind) for row_behind in rows_behind[identity]]
        cells.append(
            ShownCell(
                anchor=f"cell-{number}-{identity[0]}",
                cell_id=identity[0],
                name=f"{name}, {row.length}",
                status=shown.rows[number]["status"],
                row=row,
                values=_sort_values(shown.rows[number]),
                facts=cell_facts(shown.rows[number]),
                settings=_own_settings(records[0], shared),
                attempts=[_attempt(record) for record in records],
            )
        )
    return cells


def _sort_values(cell: Mapping[Any, Any]) -> list[str]:
    found = (cell[column] for column in SORTED_BY)
    return ["" if value is None or pd.isna(value) else str(value) for value in found]


def _rows_behind(frame: pd.DataFrame, shown: pd.DataFrame) -> RowsBehind:
    """Per cell that is shown the rows of its records."""
    rows: RowsBehind = {}
    of_shown = frame[frame["cell_id"].isin(shown["cell_id"])]
    for row, identity in zip(of_shown.index, _identities(of_shown), strict=True):
        rows.setdefault(identity, []).append(row)
    return rows


def _identities(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """What each row is of: the request, its provenance and machine."""
    columns = (frame[key].fillna("").tolist() for key in ("cell_id", "provenance", "device_name"))
    return zip(*columns, strict=True)


def distinct_values(mappings: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            values.setdefault(key, {})[_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _own_settings(record: Record, shared: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(key, _text(value)) for key, value in record["config"].items() if key not in shared]


def _attempt(record: Record) -> Attempt:
    failure = record.get("failure") or {}
    where = [
        f"rank {failure['rank']}" if failure.get("rank") is not None else None,
        *(failure.get(key) for key in ("phase", "step_phase")),
    ]
    engagement, losses = record.get("engagement") or {}, (record.get("losses") or {}).get("loss")
    facts = {
        "status": status_label(record["status"]),
        "reason": record["reason"],
        "failed in": ", ".join(filter(None, where)),
        "provenance": record["provenance"],
        "started": record.get("started_at"),
        "took": None if record.get("wall_s") is None else f"{record['wall_s']:.1f} s",
        "attention modules entered": ", ".join(engagement.get("modules", ())),
        "parity with float64": _parity(record.get("parity")),
        "[tokens, query heads, KV heads] in attention": _text(engagement.get("attention_shapes", "")),
        "bytes sent per step, by purpose and rank": _text(engagement.get("sent_bytes", "")),
        **_traced(record.get("trace") or {}),
        "loss, first to last step": f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else None,
        **memory_facts(record),
    }
    present = [(name, str(text)) for name, text in facts.items() if text]
    title = f"repeat {record['repeat']}"
    return Attempt(title, present, largest_blocks(failure), failure.get("log_tail") or None)


def _traced(trace: Mapping[str, Any]) -> dict[str, str | None]:
    """What a traced step spent on others, in ms by purpose and rank, and how evenly work was spread."""
    return {
        "exposed communication, ms by purpose and rank": _times(trace.get("purpose_exposed_ms")),
        "waiting for other ranks, ms by purpose and rank": _times(trace.get("purpose_waiting_ms")),
        "compute, ms by part and rank": _times(trace.get("compute_ms")),
        "causal (query, key, head) triples by rank": _text(trace.get("causal_area") or ""),
        "purposes unknown": "; ".join(filter(None, trace.get("unjoined", ()))),
    }


def _times(times_ms: Mapping[str, Sequence[float]] | None) -> str | None:
    """`attention 1.23, 4.56; gradients 7.89, 0.12`."""
    if not times_ms:
        return None
    return "; ".join(f"{name} {', '.join(map(number_label, ranks))}" for name, ranks in times_ms.items())


def _parity(parity: Mapping[str, Any] | None) -> str | None:
    """Every tensor's error with its limit, relative to its maximum."""
    if not parity:
        return None
    if parity.get("reason"):
        return f"not compared: {parity['reason']}"
    pairs = (
        f"{name} {error:.1e} (limit {parity['limits'][name]:.0e})" for name, error in parity["errors"].items()
    )
    return f"at {parity['tokens']} tokens: {', '.join(pairs)}"


def _with_packages(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment with its packages one by one."""
    packages = environment.get("packages") or {}
    rest = {key: value for key, value in environment.items() if key != "packages"}
    return rest | {f"package {name}": version for name, version in packages.items()}


def _text(value: Any) -> str:
    """A value as a reader would write it: lists and mappings as JSON, nothing as `none`."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
