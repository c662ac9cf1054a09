"""Rebuild a sweep's summary, figures and page from its records: `python -m analysis.report FOLDER...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analysis.answers.loss_agreement import is_as_expected
from analysis.answers.provenance import origin_lines
from analysis.cells.cells import Cells
from analysis.cells.position_losses import longest_group
from analysis.cells.summary import csv_text
from analysis.read.archive import ORIGIN_COLUMNS, Archive, read_archive
from analysis.read.hardware import peak_flops_per_s
from analysis.read.views import View
from analysis.show.columns import columns_of, named_rows
from analysis.show.findings import Findings
from analysis.show.markdown import markdown_cell, markdown_section, markdown_table
from analysis.show.page.page import render
from analysis.show.section import FigureFile, Table
from analysis.show.sections import sections_of
from analysis.show.terminal import terminal_text
from bench.common.command import outlive_readers, tool_command
from bench.config import ExitCode
from bench.record.store import StoreError, warn_in_one_line, write_atomically


def write_report(folder: Path) -> bool:
    """Rebuild summary.csv, summary.md, figures/ and report.html in a sweep's folder, and print the summary.

    Returns:
        False if `experiment=loss_equivalence` found a difference that it must not find; else True.

    Raises:
        StoreError: The records cannot be read.
    """
    return _write(read_archive([folder], peak_flops_per_s()), folder)


def draw_figures(findings: Findings, folder: Path) -> Sequence[FigureFile]:
    """Write every figure into the folder and return the files. matplotlib is imported here, which is slow."""
    from analysis.show.figures.figures import write_figures

    positions = longest_group(findings.archive)
    return write_figures(findings.drawn, folder, findings.comparisons, findings.scored_cells, positions)


def _read_records(folders: Sequence[Path]) -> Archive:
    """Return the records of the folders. Raise StoreError if there are none."""
    archive = read_archive(folders, peak_flops_per_s())
    if archive.frame.empty:
        raise StoreError(f"{folders[0]}: it has no records yet; run the sweep first")
    return archive


def _write(archive: Archive, output: Path, mix: Collection[str] = ()) -> bool:
    """Write summary.csv, summary.md, report.html and the figures, and print the summary.

    Args:
        archive: Records of the report.
        output: Folder of the files.
        mix: Origins, such as `code`, in which records may differ and still be compared.
    """
    output.mkdir(parents=True, exist_ok=True)
    findings = Findings.from_archive(
        archive.with_equal_origins(mix), origin_lines(archive, archive.frame, mix)
    )
    figures = draw_figures(findings, output / "figures")
    findings = replace(findings, figures=figures)
    all_cells = Cells.of_records(findings.archive.frame) if findings.comparisons else findings.cells
    sections, page = sections_of(findings), output / "report.html"
    heading = markdown_cell(findings.cells.heading)
    summary = "\n\n".join(["# Summary", heading, *map(markdown_section, sections)])
    write_atomically(output / "summary.csv", csv_text(all_cells.frame))
    write_atomically(output / "summary.md", f"{summary}\n")
    write_atomically(page, render(findings, sections))
    printed = terminal_text(sections, answer_first=findings.cells.is_all_predicted)
    print(f"{printed}report: {page}", flush=True)
    return all(map(is_as_expected, findings.comparisons))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog=tool_command("analysis.report"), description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep's folder")
    parser.add_argument(
        "--mix",
        action="append",
        choices=[*ORIGIN_COLUMNS],
        default=[],
        help="compare records although they differ in this origin, in series and speed-ups; may be repeated",
    )
    parser.add_argument("--output", type=Path, help="folder of the report (default: the first FOLDER)")
    parser.add_argument(
        "--table",
        choices=[*TABLE_FORMS],
        help="print the table of cells in this form, for a paper; write no files",
    )
    chosen = parser.parse_args(arguments)
    warn_in_one_line()
    try:
        archive, mix = _read_records(chosen.folders), dict.fromkeys(chosen.mix)
        if chosen.table:
            cells = Findings.from_archive(archive.with_equal_origins(mix)).cells
            table = Table.from_items(columns_of(cells), named_rows(cells))
            print(TABLE_FORMS[chosen.table](table.in_view(View.PAGE)))
        else:
            _write(archive, chosen.output or chosen.folders[0], mix)
    except StoreError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    except OSError as error:
        print(
            f"{error.filename}: {error.strerror or error}; choose another --output",
            file=sys.stderr,
        )
        return ExitCode.INVALID_REQUEST
    return ExitCode.OK


def _latex(table: Table) -> str:
    """Return the table as LaTeX with the rules of booktabs."""
    frame = pd.DataFrame(table.rows, columns=[column.heading for column in table.columns], dtype="str")
    style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    return style.to_latex(hrules=True).rstrip()


TABLE_FORMS: Mapping[str, Callable[[Table], str]] = {"latex": _latex, "markdown": markdown_table}


if __name__ == "__main__":
    sys.exit(main())
