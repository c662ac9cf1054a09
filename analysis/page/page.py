"""The report's one page: everything the template shows, and the template filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from analysis.answers.equivalence import FLOOR_READING, equivalence_line
from analysis.answers.next_steps import next_steps
from analysis.answers.published import HEADINGS as CLAIM_HEADINGS
from analysis.answers.published import Decided
from analysis.answers.reasons import failure_reasons
from analysis.answers.score import score_lines
from analysis.answers.verdict import Verdict
from analysis.cells.cells import Cells
from analysis.cells.equivalence import Comparison
from analysis.cells.selection import Selection, for_pages
from analysis.cells.summary import CELL
from analysis.figures.figure_file import FigureFile
from analysis.frame.archive import Archive
from analysis.frame.load import Record, node_links
from analysis.labels import count_label, more_label
from analysis.metrics.definitions import meanings_of
from analysis.page.facts import CHECK_HEADINGS, Attempt, as_text, attempt, cell_facts
from analysis.tables.ablation import HEADINGS as ABLATION_HEADINGS
from analysis.tables.ablation import ablation_rows
from analysis.tables.attention import COLUMNS as ATTENTION_COLUMNS
from analysis.tables.attention import HEADINGS as ATTENTION_HEADINGS
from analysis.tables.attention import attention_rows
from analysis.tables.equivalence import HEADINGS as EQUIVALENCE_HEADINGS
from analysis.tables.equivalence import POST, PUBLISHED_HEADINGS, equivalence_rows, published_rows
from analysis.tables.max_length import HEADINGS as LONGEST_HEADINGS
from analysis.tables.max_length import READING as LONGEST_READING
from analysis.tables.max_length import Found as Longest
from analysis.tables.max_length import max_length_lines, max_length_rows
from analysis.tables.rows import (
    MAX_NUMBERS,
    NUMBER_HEADINGS,
    SORTED_BY,
    Row,
    headings_of,
    number_rows,
    rows_of,
)
from analysis.tables.score import COLUMNS as SCORE_COLUMNS
from analysis.tables.score import HEADINGS as SCORE_HEADINGS
from analysis.tables.score import score_rows

BLOCK_HEADINGS = ("role", "dtype", "shape", "blocks", "together")
FEW_DETAILS = 8
"""So many comparisons stand on the first screen; the others are folded away."""
SPEED_UP_HEADING = "speed-up"
MAX_VALUES = 4
"""More different values than this are counted, not listed."""
ONE_BY_ONE: Mapping[str, str] = {"packages": "package", "inherited_env": "variable"}
"""Mappings of an environment whose entries are shown by themselves, after this word."""
OF_PAIRS = ("gpu_topology", "gpu_p2p")
"""Mappings with a word for each pair of GPUs."""
RowsBehind = dict[tuple[str, ...], list[int]]
"""Per cell the rows of the archive's frame that its records are."""


@dataclass(frozen=True, slots=True)
class ShownCell:
    """One row of the table with the records behind it."""

    anchor: str
    cell_id: str
    name: str
    status: str
    row: Row
    values: list[str]
    """What the table is sorted by, heading by heading: plain numbers or words, empty where missing."""
    facts: list[tuple[str, str]]
    """Of the cell as a whole."""
    settings: list[tuple[str, str]]
    """Those not shared by all cells."""
    attempts: list[Attempt]


def render(
    archive: Archive,
    cells: Cells,
    found: Verdict,
    figures: Callable[[], Sequence[FigureFile]],
    figures_note: str | None,
    compared: Sequence[Comparison] = (),
    claims: Decided | None = None,
    longest: Sequence[Longest] = (),
) -> str:
    """The whole page as HTML; it loads nothing from anywhere. Too many cells are not all listed.

    `figures` are asked for last, so that they may still be drawn while the cells are put into words.
    """
    shared = {key: as_text(value) for key, value in archive.shared.items()}
    shown = for_pages(cells)
    rows_behind = _rows_behind(archive.frame, shown.cells.frame)
    words = {
        **_answer(cells, found),
        **_compared(compared, claims),
        **_tables(cells, shown),
        **_longest(longest),
        "count": f"{count_label(len(cells), 'cell')}, {count_label(len(archive.frame), 'record')}",
        "figures_note": figures_note,
        "cells": shown_cells(archive, shown.cells, rows_behind, shared),
        "shared": [*shared.items()],
        "environment": distinct_values(map(_one_by_one, archive.environments)),
    }
    return _template().render(figures=figures(), **words)


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("analysis.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def _answer(cells: Cells, found: Verdict) -> dict[str, Any]:
    """What the first screen shows: numbers in the table's order where nothing is ranked, else who leads."""
    is_ranked = cells.caveat is None
    rest = len(cells) - MAX_NUMBERS
    more = f"{more_label(rest, 'cell')} in the table of cells" if rest > 0 else ""
    return {
        "subtitle": cells.subtitle,
        "banner": cells.banner,
        "verdict": found,
        "is_ranked": is_ranked,
        "few_details": FEW_DETAILS,
        "numbers": [] if is_ranked else number_rows(cells),
        "number_headings": [(heading, None) for heading in NUMBER_HEADINGS],
        "numbers_note": more,
    }


def _compared(compared: Sequence[Comparison], claims: Decided | None) -> dict[str, Any]:
    """Trainings beside one another, and published numbers beside these records."""
    return {
        "equivalence": [(each.name, equivalence_line(each), equivalence_rows(each)) for each in compared],
        "equivalence_headings": EQUIVALENCE_HEADINGS,
        "floor_reading": FLOOR_READING,
        "published": published_rows(),
        "published_headings": PUBLISHED_HEADINGS,
        "published_source": POST,
        "claims": claims,
        "claim_headings": CLAIM_HEADINGS,
    }


def _tables(cells: Cells, shown: Selection) -> dict[str, Any]:
    """The tables below the figures, with their headings; speed-up is none where nothing is ranked."""
    headings = with_meanings(headings_of(cells), SORTED_BY)
    return {
        "headings": [each for each in headings if cells.caveat is None or each[0] != SPEED_UP_HEADING],
        "has_predicted": bool(cells.are_predicted.any()),
        "score_lines": score_lines(cells),
        "score_headings": with_meanings(SCORE_HEADINGS, SCORE_COLUMNS),
        "score_rows": score_rows(shown.cells),
        "block_headings": BLOCK_HEADINGS,
        "check_headings": [(heading, None) for heading in CHECK_HEADINGS],
        "reasons": failure_reasons(cells),
        "next_steps": next_steps(cells),
        "cells_note": shown.note,
        "attention_headings": with_meanings(ATTENTION_HEADINGS, ATTENTION_COLUMNS),
        "attention_rows": attention_rows(shown.cells),
        "ablation_headings": [(heading, None) for heading in ABLATION_HEADINGS],
        "ablation_rows": ablation_rows(cells),
    }


def _longest(longest: Sequence[Longest]) -> dict[str, Any]:
    """The longest lengths that trained, where they were looked for."""
    return {
        "longest_headings": [(heading, None) for heading in LONGEST_HEADINGS],
        "longest_rows": max_length_rows(longest),
        "longest_lines": max_length_lines(longest),
        "longest_reading": LONGEST_READING,
    }


def with_meanings(headings: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each heading with what the column behind it means, None where it is no measured quantity."""
    return [*zip(headings, meanings_of(columns), strict=True)]


def shown_cells(
    archive: Archive, shown: Cells, rows_behind: RowsBehind, shared: Mapping[str, str]
) -> list[ShownCell]:
    """The cells, each with its own settings and its records."""
    cells, links = [], node_links()
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
                facts=cell_facts(shown.rows[number], is_ranked=shown.caveat is None),
                settings=_own_settings(records[0], shared),
                attempts=[attempt(record, links) for record in records],
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
    """What each row is of: the request, its provenance, machine and software."""
    columns = (frame[key].fillna("").tolist() for key in CELL)
    return zip(*columns, strict=True)


def distinct_values(mappings: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            values.setdefault(key, {})[as_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _own_settings(record: Record, shared: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(key, as_text(value)) for key, value in record["config"].items() if key not in shared]


def _one_by_one(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment with its packages and variables one by one, and pairs of GPUs that are alike as one."""
    rest = {key: value for key, value in environment.items() if key not in ONE_BY_ONE}
    pairs = {key: _of_pairs(environment[key]) for key in OF_PAIRS if environment.get(key)}
    return {**rest, **pairs} | {
        f"{word} {name}": value
        for key, word in ONE_BY_ONE.items()
        for name, value in (environment.get(key) or {}).items()
    }


def _of_pairs(values: Mapping[str, str]) -> str:
    """`NVLink (all 28 pairs)`, or the pairs of each word: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    alike: dict[str, list[str]] = {}
    for pair, word in values.items():
        alike.setdefault(word, []).append(pair)
    if len(alike) == 1 and len(values) > 1:
        return f"{min(alike)} (all {len(values)} pairs)"
    return ", ".join(f"{word} ({', '.join(pairs)})" for word, pairs in alike.items())
