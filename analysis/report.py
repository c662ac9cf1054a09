"""Rebuild a sweep's summary, figures and page from its records: `python -m analysis.report FOLDER...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from analysis.answers.loss_agreement import equivalence_line, is_as_expected, with_equivalence
from analysis.answers.next_steps import kernel_lines, next_steps
from analysis.answers.no_result import failure_reasons
from analysis.answers.provenance import origin_lines, prediction_lines, replay_lines
from analysis.answers.verdict import Verdict, verdict
from analysis.cells.cells import Cells
from analysis.cells.equivalence import EXPERIMENT, Comparison, comparisons
from analysis.cells.selection import ALL_IN, MAX_SHOWN_CELLS, Selection, for_figures
from analysis.cells.summary import csv_text
from analysis.labels import more_label
from analysis.read.archive import MADE_WITH, Archive, read_archive
from analysis.read.hardware import peak_flops_per_s
from analysis.show.figures.figure_file import FigureFile
from analysis.show.page.page import render
from analysis.show.tables.attention import HEADINGS, SHORT_HEADINGS, attention_rows
from analysis.show.tables.loss_differences import equivalence_markdown
from analysis.show.tables.max_length import EXPERIMENT as LONGEST
from analysis.show.tables.max_length import HEADINGS as LONGEST_HEADINGS
from analysis.show.tables.max_length import READING as LONGEST_READING
from analysis.show.tables.max_length import SHORT_HEADINGS as SHORT_LONGEST_HEADINGS
from analysis.show.tables.max_length import (
    Found,
    longest_lengths,
    max_length_lines,
    max_length_rows,
    max_length_short_rows,
)
from analysis.show.tables.predicted import HEADINGS as PREDICTION_HEADINGS
from analysis.show.tables.predicted import prediction_rows
from analysis.show.tables.published_post import post_table
from analysis.show.tables.rows import TABLE_FORMS, markdown_cell, markdown_table, markdown_text, summary_table
from analysis.show.tables.terminal import TERMINAL_ROWS, print_cells, print_table
from bench.common.command import again_command, is_sweep, outlive_readers, tool_words
from bench.common.statistics import MIN_PROCESSES
from bench.config import ExitCode
from bench.record.record import Role
from bench.record.store import StoreError, warn_in_one_line, write_whole

NO_ANSWERS = (Role.CONTROL, Role.MISTAKE)
"""Roles whose speed and memory answer nothing."""
PUBLISHED = {"published_memory", "published_throughput"}
"""Experiments whose records are compared with a published post."""
TERMINAL_COLUMNS = 100


def write_report(folder: Path) -> bool:
    """Rebuild summary.csv, summary.md, figures/ and report.html in this folder; print the summary.

    False where an experiment that has one right answer found another.
    """
    return write_joint_report([folder], folder)


def write_joint_report(folders: Sequence[Path], output: Path) -> bool:
    """One report of several sweeps, written into `output`; raises StoreError for unusable records."""
    return _write(_records(folders), output)


def _records(folders: Sequence[Path]) -> Archive:
    return read_archive(folders, peak_flops_per_s())


def _some_records(folders: Sequence[Path]) -> Archive:
    archive = _records(folders)
    if archive.frame.empty:
        raise StoreError(f"{folders[0]}: no records yet; run the sweep first")
    return archive


def _write(archive: Archive, output: Path, mix: Collection[str] = ()) -> bool:
    """Write and print everything, records of other origins put together where `mix` names what differs.

    Whether what has one right answer has it.
    """
    output.mkdir(parents=True, exist_ok=True)
    origins = origin_lines(archive, archive.frame, mix)
    archive = archive.mixed(mix)
    compared = comparisons(archive)
    alone = bool(archive.frame["experiment"].eq(EXPERIMENT).all())
    cells = _answering(archive)
    everything = Cells.of_records(archive.frame) if compared else cells
    found = with_equivalence(verdict(cells, _deciding_command(archive)), compared, alone=alone)
    found = replace(found, origins=origins, kernels=kernel_lines(archive), replayed=replay_lines(cells))
    longest = longest_lengths(cells, archive.frame)
    drawn = for_figures(cells)
    figures = draw_figures(drawn, output / "figures", compared)
    page = output / "report.html"
    write_whole(output / "summary.csv", csv_text(everything.frame))
    write_whole(output / "summary.md", _markdown_page(cells, longest, found, compared, figures))
    write_whole(page, render(archive, cells, found, figures, drawn.note, compared, longest))
    said = _terminal_text(cells, longest, found, compared, page)
    names = {*archive.frame["experiment"]}
    if len(names) == 1 and names <= PUBLISHED:
        said += _write_post_table(names.pop(), archive, output)
    print(said, end="", flush=True)
    return all(map(is_as_expected, compared))


def _write_post_table(experiment: str, archive: Archive, output: Path) -> str:
    """Write and return the comparison with the published post."""
    text, path = post_table(experiment, archive.frame), output / f"{experiment}.md"
    write_whole(path, text)
    return f"{text}table: {path}\n"


def _answering(archive: Archive) -> Cells:
    """The cells whose speed and memory answer something."""
    return Cells.of_records(archive.frame[~archive.frame["role"].isin(NO_ANSWERS)])


def draw_figures(drawn: Selection, folder: Path, compared: Sequence[Comparison]) -> Sequence[FigureFile]:
    """Every figure, written into the folder; imports matplotlib, which takes long."""
    from analysis.show.figures.figures import write_figures

    return write_figures(drawn, folder, compared)


def _deciding_command(archive: Archive) -> Callable[[str], str] | None:
    """Return what makes the command that goes on with a sweep with a word; None for several commands."""
    folders = {path.parent for path in dict.fromkeys(path for path, _ in archive.places)}
    given = {tuple(environment.argv or [""]) for environment in archive.environments}
    if archive.frame["experiment"].eq(LONGEST).any():
        return None  # each length runs once there, and it says whether it trains, not how fast
    if len(folders) != 1 or not all(is_sweep(words[0]) for words in given):
        return None
    repeats = (f"measure.repeats={MIN_PROCESSES}", "measure.repeats_budget_s=0")
    commands = {again_command(words, min(folders), *repeats): words for words in given}
    if len(commands) != 1:
        return None
    (words,) = commands.values()
    return lambda word: again_command(words, min(folders), word)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog=tool_words("analysis.report"), description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep's folder")
    parser.add_argument(
        "--mix",
        action="append",
        choices=[*MADE_WITH],
        default=[],
        help="set records beside one another that differ in it, in series and speed-ups; may be repeated",
    )
    parser.add_argument("--output", type=Path, help="where to write (default: the first FOLDER)")
    parser.add_argument(
        "--table", choices=[*TABLE_FORMS], help="print the summary in this form, for a paper; write nothing"
    )
    chosen = parser.parse_args(arguments)
    warn_in_one_line()
    try:
        archive, mix = _some_records(chosen.folders), dict.fromkeys(chosen.mix)
        if chosen.table:
            print(summary_table(_answering(archive.mixed(mix)), chosen.table), end="")
        else:
            _write(archive, chosen.output or chosen.folders[0], mix)
    except StoreError as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    except OSError as error:
        print(f"{error.filename}: {error.strerror or error}; name another --output", file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    return ExitCode.OK


def _markdown_page(
    cells: Cells,
    longest: Sequence[Found],
    found: Verdict,
    compared: Sequence[Comparison],
    figures: Sequence[FigureFile],
) -> str:
    answer = _bullets(_answer(found, cells))
    rest = len(cells) - MAX_SHOWN_CELLS
    more = f"\n{more_label(rest, 'cell')}; {ALL_IN}\n" if rest > 0 else ""
    shown = cells.first(MAX_SHOWN_CELLS)
    table, calls = markdown_text(shown), attention_rows(shown)
    attention = f"\n## Attention alone\n\n{markdown_table(HEADINGS, calls)}" if calls else ""
    losses = f"## Loss equivalence\n\n{equivalence_markdown(compared)}\n" if compared else ""
    tables = f"{losses}{_longest(longest)}{table}{more}{attention}{_predicted(shown)}{_captions(figures)}"
    return f"# Summary\n\n{markdown_cell(cells.subtitle)}\n\n{answer}\n\n{tables}"


def _captions(figures: Sequence[FigureFile]) -> str:
    """What the figures show, as Markdown."""
    alike: dict[tuple[str, str], list[str]] = {}
    for each in figures:
        alike.setdefault((each.title, each.caption), []).append(f"figures/{each.name}.png")
    lines = [f"{title} ({', '.join(files)}): {caption}" for (title, caption), files in alike.items()]
    return f"\n## Figures\n\n{_bullets(lines)}\n" if lines else ""


def _longest(longest: Sequence[Found]) -> str:
    """The longest lengths that trained, as Markdown; empty where none was looked for."""
    if not longest:
        return ""
    table = markdown_table(LONGEST_HEADINGS, max_length_rows(longest))
    return f"## The longest sequence that trains\n\n{table}\n{LONGEST_READING}\n\n"


def _predicted(shown: Cells) -> str:
    """Predictions beside measurements, as Markdown; empty where no cell has both."""
    rows = prediction_rows(shown)
    if not rows:
        return ""
    table = markdown_table(PREDICTION_HEADINGS, rows)
    return f"\n## Predicted beside measured\n\n{_bullets(prediction_lines(shown))}\n\n{table}"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {markdown_cell(line)}" for line in lines)


def _answer(found: Verdict, cells: Cells) -> list[str]:
    caveat = [found.caveat] if found.caveat else []
    way = [found.to_decide] if found.to_decide else []
    lines = [
        found.answer,
        *(found.details if cells.is_all_predicted else ()),
        *caveat,
        *found.replayed,
        *found.failures,
        *found.fits,
        *found.shares,
        *found.unchecked,
    ]
    lines.append(found.certainty)
    lines += [*found.origins, *found.kernels, *way]
    return [line for line in lines if line]


def _terminal_text(
    cells: Cells,
    longest: Sequence[Found],
    found: Verdict,
    compared: Sequence[Comparison],
    page: Path,
) -> str:
    """What is printed once all is written."""
    console = Console(highlight=False)
    console.width = min(console.width, TERMINAL_COLUMNS) if console.is_terminal else TERMINAL_COLUMNS
    with console.capture() as said:
        _print_summary(console, cells, longest, found, compared)
        console.print(Text(f"report: {page}"), soft_wrap=True)
    return said.get()


def _print_summary(
    console: Console,
    cells: Cells,
    longest: Sequence[Found],
    found: Verdict,
    compared: Sequence[Comparison],
) -> None:
    first = [*max_length_lines(longest), *_answer(found, cells)] if cells.is_all_predicted else []
    _print_lines(console, first, found)
    print_cells(console, cells)
    if len(cells) > TERMINAL_ROWS:
        console.print(f"{more_label(len(cells) - TERMINAL_ROWS, 'cell')} in summary.csv")
    calls = attention_rows(cells.first(TERMINAL_ROWS))
    if calls:
        print_table(console, dict(zip(SHORT_HEADINGS, zip(*calls, strict=True), strict=True)))
    if longest:
        texts = zip(*max_length_short_rows(longest), strict=True)
        print_table(console, dict(zip(SHORT_LONGEST_HEADINGS, texts, strict=True)))
    for line in (f"{each.name}: {equivalence_line(each)}" for each in compared):
        if line not in found.answer:  # which repeats those that found something else
            console.print(Text(line))
    lines = [*failure_reasons(cells), *next_steps(cells), *prediction_lines(cells)]
    lines += [] if first else [*max_length_lines(longest), *_answer(found, cells)]
    if not cells.are_predicted.any():  # the reasons have said which cells failed, and how
        lines = [line for line in lines if line not in found.failures]
    _print_lines(console, lines, found)


def _print_lines(console: Console, lines: Sequence[str], found: Verdict) -> None:
    """Print a line each, without breaking those that end in a command."""
    for line in lines:
        console.print(Text(line), soft_wrap=line in (found.to_decide, *found.replayed[-1:]))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # values of a large report are not freed one by one
