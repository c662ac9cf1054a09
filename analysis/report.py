"""Rebuild a sweep's summary, figures and page from its records: `python -m analysis.report FOLDER...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text

from analysis.comparison import with_speed_up
from analysis.drawing import build_figure, png_bytes, svg_bytes
from analysis.figures import FIGURES
from analysis.labels import count_label
from analysis.load import Record, peak_flops_per_s, read_sweeps, to_frame
from analysis.page import render
from analysis.style import subtitle
from analysis.summary import summarise
from analysis.tables import (
    TERMINAL_ROWS,
    csv_text,
    failure_reasons,
    markdown_cell,
    markdown_text,
    terminal_table,
)
from analysis.verdict import Verdict, verdict
from bench.store import StoreError, warn_in_one_line

EXIT_OK, EXIT_REQUEST_WRONG = 0, 2
TERMINAL_COLUMNS = 100


def write_report(folder: Path) -> None:
    """Rebuild summary.csv, summary.md, figures/ and report.html in this folder; print the summary."""
    write_joint_report([folder], folder)


def write_joint_report(folders: Sequence[Path], output: Path) -> None:
    """One report of several sweeps, written into `output`; raises StoreError for unusable records."""
    _write(read_sweeps(folders), output)


def _some_records(folders: Sequence[Path]) -> list[Record]:
    records = read_sweeps(folders)
    if not records:
        raise StoreError(f"{folders[0]}: no records yet; run the sweep first")
    return records


def _write(records: Sequence[Record], output: Path) -> None:
    summary = with_speed_up(summarise(to_frame(records, peak_flops_per_s())))
    pictures = output / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    svgs = {}
    for name in FIGURES:
        figure = build_figure(name, summary)
        svgs[name] = svg_bytes(figure)
        (pictures / f"{name}.png").write_bytes(png_bytes(figure))
        (pictures / f"{name}.svg").write_bytes(svgs[name])
    (output / "summary.csv").write_text(csv_text(summary), encoding="utf-8")
    (output / "summary.md").write_text(_markdown_page(summary), encoding="utf-8")
    page = output / "report.html"
    page.write_text(render(records, summary, svgs), encoding="utf-8")
    _print_summary(summary, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep's folder")
    parser.add_argument("--output", type=Path, help="where to write (default: the first FOLDER)")
    chosen = parser.parse_args(arguments)
    warn_in_one_line()
    try:
        _write(_some_records(chosen.folders), chosen.output or chosen.folders[0])
    except StoreError as error:
        print(error, file=sys.stderr)
        return EXIT_REQUEST_WRONG
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}; name another --output", file=sys.stderr)
        return EXIT_REQUEST_WRONG
    return EXIT_OK


def _markdown_page(summary: pd.DataFrame) -> str:
    answer = "\n".join(f"- {markdown_cell(line)}" for line in _answer(verdict(summary)))
    return f"# Summary\n\n{markdown_cell(subtitle(summary))}\n\n{answer}\n\n{markdown_text(summary)}"


def _answer(found: Verdict) -> list[str]:
    caveat = [found.caveat] if found.caveat else []
    return [found.answer, *caveat, *found.failures, found.certainty]


def _print_summary(summary: pd.DataFrame, page: Path) -> None:
    console = Console(highlight=False)
    console.width = min(console.width, TERMINAL_COLUMNS) if console.is_terminal else TERMINAL_COLUMNS
    console.print(terminal_table(summary))
    if len(summary) > TERMINAL_ROWS:
        console.print(f"and {count_label(len(summary) - TERMINAL_ROWS, 'cell')} more in summary.md")
    for line in [*failure_reasons(summary), *_answer(verdict(summary))]:
        console.print(Text(line))
    console.print(Text(f"report: {page}"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
