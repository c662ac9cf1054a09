"""Turn records into the findings of a report, and tables into rows by heading."""

from analysis.read.archive import read_archive
from analysis.show.columns import columns_of, named_rows
from analysis.show.findings import Findings
from analysis.show.section import Table
from tests.support.records import write_sweep


def findings_of(folder, records, peaks=None):
    """Return the findings of a report, without figures, on these records."""
    return Findings.from_archive(read_archive([write_sweep(folder, records)], peaks or {}))


def rows_by_heading(table, view):
    """Return the rows of a table in a view, by heading; a heading without any text is omitted."""
    shown = table.in_view(view)
    headings = [column.heading for column in shown.columns]
    return [dict(zip(headings, row, strict=True)) for row in shown.rows]


def rows_of(cells, view):
    """Return the rows of the table of these cells."""
    return rows_by_heading(Table.from_items(columns_of(cells), named_rows(cells)), view)
