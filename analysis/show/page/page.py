"""The report's one page: everything the template shows, and the template filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from msgspec import to_builtins

from analysis.answers.loss_agreement import FLOOR_READING, equivalence_line
from analysis.answers.next_steps import next_steps
from analysis.answers.no_result import failure_reasons
from analysis.answers.provenance import prediction_lines
from analysis.answers.verdict import Verdict
from analysis.cells.cells import Cells
from analysis.cells.equivalence import Comparison
from analysis.cells.selection import for_pages
from analysis.cells.summary import CELL
from analysis.labels import count_label, more_label
from analysis.read.archive import Archive
from analysis.read.hardware import node_links
from analysis.read.metrics import meanings_of
from analysis.show.figures.figure_file import FigureFile
from analysis.show.page.facts import cell_facts, environment_facts
from analysis.show.tables import attention, loss_differences, max_length, predicted
from analysis.show.tables.record import BLOCK_HEADINGS, CHECK_HEADINGS, Attempt, Pairs, as_text, attempt
from analysis.show.tables.rows import (
    MAX_NUMBERS,
    NUMBER_HEADINGS,
    SORTED_BY,
    SPEED_UP,
    headings_of,
    main_headings,
    number_rows,
    rows_of,
)

LOSS_READING = (
    f"Loss: sum of token losses over the number of valid tokens. {FLOOR_READING} A later step may be the root"
    " of its number times as far off, because rounding adds up like a random walk."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with what is said around it; the page leaves out one without rows."""

    title: str
    headings: Sequence[tuple[str, str | None]]
    """Each with what its column means."""
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()
    """Columns of words beside the first; the others are numbers."""
    lines: Sequence[str] = ()
    """Sentences above it."""
    reading: str = ""
    """How to read it, below it."""


@dataclass(frozen=True, slots=True)
class ShownCell:
    """One row of the table with the records behind it."""

    anchor: str
    cell_id: str
    name: str
    status: str
    texts: Mapping[str, str]
    """By heading of the table."""
    values: Mapping[str, str]
    """What the table is sorted by: plain numbers or words, none where missing."""
    facts: Pairs
    """Of the cell as a whole."""
    settings: Pairs
    """Those not shared by all cells."""
    attempts: list[Attempt]


def render(
    archive: Archive,
    cells: Cells,
    found: Verdict,
    figures: Sequence[FigureFile],
    figures_note: str | None,
    compared: Sequence[Comparison] = (),
    longest: Sequence[max_length.Found] = (),
) -> str:
    """The whole page as HTML; it loads nothing from anywhere. Too many cells are not all listed."""
    shared = {key: as_text(value) for key, value in archive.shared.items()}
    shown, is_ranked = for_pages(cells), cells.caveat is None
    headings = [*zip(headings_of(cells), meanings_of(SORTED_BY), strict=True)]
    main = main_headings(cells)
    loader = PackageLoader("analysis.show.page", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(
        count=f"{count_label(len(cells), 'cell')}, {count_label(len(archive.frame), 'record')}",
        cells=cells,
        verdict=found,
        numbers=Table("", [], []) if is_ranked or not found.details else _numbers(cells),
        answers=[*_compared(compared), _longest(longest)],
        first=next(iter(figures), None),
        figures=figures[1:],
        figures_note=figures_note,
        headings=[pair for pair in headings if pair[0] in main],
        shown=_shown_cells(archive, shown.cells, shared, cells),
        cells_note=shown.note,
        has_predicted=bool(cells.are_predicted.any()),
        tables=_tables(cells, shown.cells),
        reasons=failure_reasons(cells),
        next_steps=next_steps(cells),
        block_headings=BLOCK_HEADINGS,
        check_headings=CHECK_HEADINGS,
        shared=[*shared.items()],
        environment=environment_facts(map(to_builtins, archive.environments)),
    )


def with_meanings(headings: Sequence[str], columns: Sequence[str] = ()) -> list[tuple[str, str | None]]:
    """Each heading with what the column behind it means, None where it is no measured quantity."""
    return [*zip(headings, meanings_of(columns) if columns else [None] * len(headings), strict=True)]


def _numbers(cells: Cells) -> Table:
    """The numbers of the first screen where nothing is ranked, in the order of the cells."""
    rest = len(cells) - MAX_NUMBERS
    more = f"{more_label(rest, 'cell')} in the table of cells" if rest > 0 else ""
    return Table("Numbers", with_meanings(NUMBER_HEADINGS), number_rows(cells), words=(2,), reading=more)


def _compared(compared: Sequence[Comparison]) -> Iterator[Table]:
    """Trainings beside one another, and the published differences beneath."""
    headings = with_meanings(loss_differences.HEADINGS)
    for each in compared:
        rows = loss_differences.equivalence_rows(each)
        yield Table(f"Loss equivalence: {each.name}", headings, rows, (6, 7), [equivalence_line(each)])
    if compared:
        published = with_meanings(loss_differences.PUBLISHED_HEADINGS)
        reading = f"{LOSS_READING} Published: {loss_differences.POST}."
        yield Table("Published loss differences", published, loss_differences.PUBLISHED, reading=reading)


def _longest(found: Sequence[max_length.Found]) -> Table:
    """The longest lengths that trained, where they were looked for."""
    told = (max_length.max_length_rows(found), (6, 7), max_length.max_length_lines(found), max_length.READING)
    return Table("The longest sequence that trains", with_meanings(max_length.HEADINGS), *told)


def _tables(cells: Cells, shown: Cells) -> list[Table]:
    """What stands below the table of cells."""
    calls = with_meanings(attention.HEADINGS, attention.COLUMNS)
    scored = with_meanings(predicted.HEADINGS, predicted.COLUMNS)
    return [
        Table("Attention alone", calls, attention.attention_rows(shown), reading=attention.READING),
        Table(
            "Predicted beside measured",
            scored,
            predicted.prediction_rows(shown),
            (),
            prediction_lines(cells),
            predicted.READING,
        ),
    ]


def _shown_cells(archive: Archive, shown: Cells, shared: Mapping[str, str], whole: Cells) -> list[ShownCell]:
    """The shown cells of the `whole` table, each with its own settings and its records."""
    cells, links, rows_behind = [], node_links(), _rows_behind(archive.frame, shown.frame)
    headings, main, is_ranked = headings_of(whole), main_headings(whole), whole.caveat is None
    told = zip(shown.rows, _identities(shown.frame), shown.names, rows_of(shown), strict=True)
    for number, (cell, identity, name, row) in enumerate(told):
        records = [archive.record(row_behind) for row_behind in rows_behind[identity]]
        settings = records[0].config.items()
        texts = dict(zip(headings, row.texts(), strict=True))
        sorted_by = zip(texts, (cell[column] for column in SORTED_BY), strict=True)
        rest = [
            (heading, text) for heading, text in texts.items() if text and heading not in (*main, SPEED_UP)
        ]
        cells.append(
            ShownCell(
                anchor=f"cell-{number}-{identity[0]}",
                cell_id=identity[0],
                name=f"{name}, {row.length}",
                status=cell["status"],
                texts=texts,
                values={heading: str(value) for heading, value in sorted_by if pd.notna(value)},
                facts=[*rest, *cell_facts(cell, is_ranked=is_ranked)],
                settings=[(key, as_text(each)) for key, each in settings if key not in shared],
                attempts=[attempt(record, links) for record in records],
            )
        )
    return cells


def _rows_behind(frame: pd.DataFrame, shown: pd.DataFrame) -> dict[tuple[str, ...], list[int]]:
    """Per cell that is shown the rows of its records."""
    rows: dict[tuple[str, ...], list[int]] = {}
    of_shown = frame[frame["cell_id"].isin(shown["cell_id"])]
    for row, identity in zip(of_shown.index, _identities(of_shown), strict=True):
        rows.setdefault(identity, []).append(row)
    return rows


def _identities(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """What each row is of: the request, its provenance, machine and software."""
    columns = (frame[key].fillna("").tolist() for key in CELL)
    return zip(*columns, strict=True)
