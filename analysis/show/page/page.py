"""Functions that render report.html from the findings and the sections."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from jinja2 import Environment as Templates
from jinja2 import PackageLoader, StrictUndefined
from msgspec import to_builtins

from analysis.cells.summary import CELL_KEY
from analysis.labels import count_label, more_label
from analysis.read.hardware import node_links
from analysis.read.views import View
from analysis.show.columns import LENGTH, STATUS
from analysis.show.findings import Findings
from analysis.show.page.record import Pairs, RecordDetails, record_details
from analysis.show.section import Column, Section, Table
from bench.common.environment import Environment

MAX_VALUES = 4
"""Largest number of different values that are listed; more are only counted."""
FLATTENED = frozenset({"packages", "inherited_env"})
"""Mappings of an environment whose entries are shown one by one."""
MAX_FIRST_ROWS = 24
"""Largest number of rows of the first table on a page that does not rank strategies."""


@dataclass(frozen=True, slots=True)
class ShownCell:
    """One row of the table of cells, with the details of the cell."""

    anchor: str
    cell_id: str
    name: str
    status: str
    status_text: str
    has_note: bool
    texts: Sequence[str]
    """Texts in the order of the columns."""
    values: Sequence[str | None]
    """Numbers or words by which the table is sorted, in the order of the columns; None if missing."""
    facts: Pairs
    """Names and texts of the cell's metrics that the table does not show."""
    settings: Pairs
    """Settings of the cell that not all cells share."""
    records: list[RecordDetails]


def render(findings: Findings, sections: Sequence[Section]) -> str:
    """Return the page as one HTML text that loads no other files."""
    archive, cells, verdict = findings.archive, findings.cells, findings.verdict
    table = findings.cell_table
    generic = [section for section in sections if not section.has_own_form]
    loader = PackageLoader("analysis.show.page", ".")
    templates = Templates(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("report.html.jinja").render(
        counts=f"{count_label(len(cells), 'cell')}, {count_label(len(archive.frame), 'record')}",
        cells=cells,
        verdict=verdict,
        first_table=None if cells.caveat is None or not verdict.details else _results_section(table),
        first_figure=next(iter(findings.figures), None),
        figures=findings.figures[1:],
        figures_note=findings.drawn.note,
        columns=table.in_view(View.PAGE).columns,
        shown=_shown_cells(findings),
        cells_note=findings.shown.note,
        answers=[section for section in generic if section.answers],
        others=[section for section in generic if not section.answers],
        view=View.PAGE,
        shared=[(key, value_text(value)) for key, value in archive.shared_settings.items()],
        environment=environment_facts(archive.environments),
    )


def _results_section(table: Table) -> Section:
    """Return the first MAX_FIRST_ROWS rows of the table of cells as a section, and how many are left out.

    It is the top of a page that does not rank strategies.
    """
    first = replace(table, rows=table.rows[:MAX_FIRST_ROWS])
    left_out = len(table.rows) - len(first.rows)
    more = f"{more_label(left_out, 'cell')} in the table of cells" if left_out else ""
    return Section("Results", table=first.in_view(View.FIRST_SCREEN), reading=more)


def _shown_cells(findings: Findings) -> list[ShownCell]:
    """Return the rows of the table of cells with their details."""
    archive, shown, table = findings.archive, findings.shown.cells, findings.cell_table
    links, record_rows = node_links(), _record_rows(archive.frame, shown.frame)
    page_columns = table.in_view(View.PAGE).columns
    cells = []
    for place, (cell, identity, name, row) in enumerate(
        zip(findings.shown_rows, _identities(shown.frame), shown.names, table.rows, strict=True)
    ):
        records = [archive.record(number) for number in record_rows[identity]]
        texts = dict(zip(table.columns, row, strict=True))
        settings = records[0].config.items()
        cells.append(
            ShownCell(
                anchor=f"cell-{place}-{identity[0]}",
                cell_id=identity[0],
                name=f"{name}, {texts[LENGTH]}",
                status=cell["status"],
                status_text=texts[STATUS],
                has_note=pd.notna(cell["note"]),
                texts=[texts[column] for column in page_columns],
                values=[_sort_value(cell, column) for column in page_columns],
                facts=[
                    (column.heading, text)
                    for column, text in texts.items()
                    if text and View.DETAILS in column.views
                ],
                settings=[
                    (key, value_text(value)) for key, value in settings if key not in archive.shared_settings
                ],
                records=[record_details(record, links) for record in records],
            )
        )
    return cells


def _sort_value(cell: Mapping[Any, Any], column: Column) -> str | None:
    """Return the value by which the page sorts a column; None if it is missing or the column has none."""
    value = None if column.sorted_by is None else cell[column.sorted_by]
    return None if pd.isna(value) else str(value)


def _record_rows(frame: pd.DataFrame, shown: pd.DataFrame) -> dict[tuple[str, ...], list[int]]:
    """Return the rows of the records of every shown cell, by what identifies the cell (`_identities`)."""
    rows: dict[tuple[str, ...], list[int]] = {}
    records = frame[frame["cell_id"].isin(shown["cell_id"])]
    for row, identity in zip(records.index, _identities(records), strict=True):
        rows.setdefault(identity, []).append(row)
    return rows


def _identities(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Yield the values that identify the cell of every row: id, provenance, machine and software."""
    columns = (frame[key].fillna("").tolist() for key in CELL_KEY)
    return zip(*columns, strict=True)


def environment_facts(environments: Iterable[Environment]) -> Pairs:
    """Return every key of the environments with its values as text, or with their number above MAX_VALUES."""
    values: dict[str, dict[str, None]] = {}
    for mapping in map(_flat_environment, environments):
        for key, value in mapping.items():
            values.setdefault(key, {})[value_text(value)] = None
    return [
        (key, "; ".join(texts) if len(texts) <= MAX_VALUES else f"{len(texts)} different values")
        for key, texts in values.items()
    ]


def _flat_environment(environment: Environment) -> dict[str, Any]:
    """Return the known values, with packages and variables one by one and pairs of GPUs summarised."""
    known = {key: value for key, value in to_builtins(environment).items() if value not in (None, [], {})}
    rest = {key: value for key, value in known.items() if key not in FLATTENED}
    pairs = {"gpu_topology": environment.gpu_topology, "gpu_p2p": environment.gpu_p2p}
    return {
        **rest,
        **{key: _gpu_pairs_text(value) for key, value in pairs.items() if value},
        **{f"package {name}": version for name, version in environment.packages.items()},
        **{f"variable {name}": value for name, value in environment.inherited_env.items()},
    }


def _gpu_pairs_text(links: Mapping[str, str]) -> str:
    """Return `NVLink (all 28 pairs)`, or the pairs by link: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    pairs_by_link: dict[str, list[str]] = {}
    for pair, link in links.items():
        pairs_by_link.setdefault(link, []).append(pair)
    if len(pairs_by_link) == 1 and len(links) > 1:
        return f"{min(pairs_by_link)} (all {len(links)} pairs)"
    return ", ".join(f"{link} ({', '.join(pairs)})" for link, pairs in pairs_by_link.items())


def value_text(value: Any) -> str:
    """Return a value as text: lists with commas, mappings as `name value; name value`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {value_text(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    return value if isinstance(value, str) else json.dumps(value)
