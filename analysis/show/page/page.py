"""The report's one page: everything the template shows, and the template filled in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from jinja2 import Environment as Templates
from jinja2 import PackageLoader, StrictUndefined
from msgspec import to_builtins

from analysis.cells.summary import CELL
from analysis.labels import count_label, more_label
from analysis.read.hardware import node_links
from analysis.read.views import View
from analysis.show.columns import LENGTH, STATUS
from analysis.show.findings import Findings
from analysis.show.page.record import Attempt, Pairs, attempt
from analysis.show.section import Column, Section, Table
from bench.common.environment import Environment

MAX_VALUES = 4
"""More different values than this are counted, not listed."""
ONE_BY_ONE = frozenset({"packages", "inherited_env"})
"""Mappings of an environment whose entries are shown by themselves."""
MAX_NUMBERS = 24
"""Rows of the first screen's table, where strategies are not ranked."""


@dataclass(frozen=True, slots=True)
class ShownCell:
    """One row of the table of cells with the records behind it."""

    anchor: str
    cell_id: str
    name: str
    status: str
    status_text: str
    has_note: bool
    texts: Sequence[str]
    """Texts in the order of the table's columns."""
    values: Sequence[str | None]
    """Values that the table is sorted by, in the same order: numbers or words, None where missing."""
    facts: Pairs
    """Facts of the cell as a whole."""
    settings: Pairs
    """Settings that are not shared by all cells."""
    attempts: list[Attempt]


def render(findings: Findings, sections: Sequence[Section]) -> str:
    """Return the whole page as HTML; it loads nothing from anywhere. Too many cells are not all listed."""
    archive, cells, verdict = findings.archive, findings.cells, findings.verdict
    table = findings.cell_table
    generic = [section for section in sections if not section.has_own_form]
    loader = PackageLoader("analysis.show.page", ".")
    templates = Templates(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("report.html.jinja").render(
        count=f"{count_label(len(cells), 'cell')}, {count_label(len(archive.frame), 'record')}",
        cells=cells,
        verdict=verdict,
        numbers=None if cells.caveat is None or not verdict.details else _numbers(table),
        first=next(iter(findings.figures), None),
        figures=findings.figures[1:],
        figures_note=findings.drawn.note,
        columns=table.in_view(View.PAGE).columns,
        shown=_shown_cells(findings),
        cells_note=findings.shown.note,
        answers=[section for section in generic if section.answers],
        others=[section for section in generic if not section.answers],
        view=View.PAGE,
        shared=[(key, as_text(value)) for key, value in archive.shared.items()],
        environment=environment_facts(archive.environments),
    )


def _numbers(table: Table) -> Section:
    """Return the numbers of the first screen where nothing is ranked, in the order of the cells."""
    rest = len(table.rows) - MAX_NUMBERS
    more = f"{more_label(rest, 'cell')} in the table of cells" if rest > 0 else ""
    first = replace(table, rows=table.rows[:MAX_NUMBERS])
    return Section("Numbers", table=first.in_view(View.FIRST_SCREEN), reading=more)


def _shown_cells(findings: Findings) -> list[ShownCell]:
    """Return the rows of the table of cells, each with its own settings and its records."""
    archive, shown, table = findings.archive, findings.shown.cells, findings.cell_table
    links, rows_behind = node_links(), _rows_behind(archive.frame, shown.frame)
    main = table.in_view(View.PAGE).columns
    cells = []
    for number, (cell, identity, name, row) in enumerate(
        zip(findings.shown_rows, _identities(shown.frame), shown.names, table.rows, strict=True)
    ):
        records = [archive.record(behind) for behind in rows_behind[identity]]
        texts = dict(zip(table.columns, row, strict=True))
        settings = records[0].config.items()
        cells.append(
            ShownCell(
                anchor=f"cell-{number}-{identity[0]}",
                cell_id=identity[0],
                name=f"{name}, {texts[LENGTH]}",
                status=cell["status"],
                status_text=texts[STATUS],
                has_note=pd.notna(cell["note"]),
                texts=[texts[column] for column in main],
                values=[_sort_value(cell, column) for column in main],
                facts=[
                    (column.heading, text)
                    for column, text in texts.items()
                    if text and View.DETAILS in column.views
                ],
                settings=[(key, as_text(each)) for key, each in settings if key not in archive.shared],
                attempts=[attempt(record, links) for record in records],
            )
        )
    return cells


def _sort_value(cell: Mapping[Any, Any], column: Column) -> str | None:
    value = None if column.sorted_by is None else cell[column.sorted_by]
    return None if pd.isna(value) else str(value)


def _rows_behind(frame: pd.DataFrame, shown: pd.DataFrame) -> dict[tuple[str, ...], list[int]]:
    """Return the rows of the records of each shown cell."""
    rows: dict[tuple[str, ...], list[int]] = {}
    of_shown = frame[frame["cell_id"].isin(shown["cell_id"])]
    for row, identity in zip(of_shown.index, _identities(of_shown), strict=True):
        rows.setdefault(identity, []).append(row)
    return rows


def _identities(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Return what each row is of: the request, its provenance, machine and software."""
    columns = (frame[key].fillna("").tolist() for key in CELL)
    return zip(*columns, strict=True)


def environment_facts(environments: Iterable[Environment]) -> Pairs:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in map(_one_by_one, environments):
        for key, value in mapping.items():
            values.setdefault(key, {})[as_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _one_by_one(environment: Environment) -> dict[str, Any]:
    """Return what is known, with packages and variables one by one, and equal pairs of GPUs as one."""
    known = {key: value for key, value in to_builtins(environment).items() if value not in (None, [], {})}
    rest = {key: value for key, value in known.items() if key not in ONE_BY_ONE}
    pairs = {"gpu_topology": environment.gpu_topology, "gpu_p2p": environment.gpu_p2p}
    return {
        **rest,
        **{key: _of_pairs(value) for key, value in pairs.items() if value},
        **{f"package {name}": version for name, version in environment.packages.items()},
        **{f"variable {name}": value for name, value in environment.inherited_env.items()},
    }


def _of_pairs(values: Mapping[str, str]) -> str:
    """`NVLink (all 28 pairs)`, or the pairs of each word: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    alike: dict[str, list[str]] = {}
    for pair, word in values.items():
        alike.setdefault(word, []).append(pair)
    if len(alike) == 1 and len(values) > 1:
        return f"{min(alike)} (all {len(values)} pairs)"
    return ", ".join(f"{word} ({', '.join(pairs)})" for word, pairs in alike.items())


def as_text(value: Any) -> str:
    """A value as a reader would write it: lists with commas, mappings as `name value; name value`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {as_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value)
