"""What changed between two sweeps, cell by cell: `python -m analysis.compare BEFORE AFTER`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.answers.change import CELL, Change, Key, changes, environment_differences, only_in
from analysis.cells.cells import SHARED_GPU_CAVEAT, shares_gpus
from analysis.cells.series import cell_names, keys_and_number
from analysis.frame.archive import Archive, read_archive
from analysis.frame.load import peak_flops_per_s
from analysis.labels import count_label, more_label
from bench.config import ExitCode
from bench.labels import length_label
from bench.store import StoreError

MAX_LISTED = 50
CAVEATS = (
    "Speed: tokens/s after over before, a ratio of medians with the bootstrap's 95 % interval.",
    "Without six samples on both sides there is no interval, so no clear difference either.",
    "Of twenty cells in which nothing changed, one may well look faster or slower.",
    "Steps of one process are not independent: measure.repeats=6 compares processes.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description=__doc__)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a sweep's folder")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another sweep's folder")
    chosen = parser.parse_args(arguments)
    try:
        peaks = peak_flops_per_s()
        before, after = (read_archive([folder], peaks) for folder in (chosen.before, chosen.after))
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    console = Console(highlight=False)
    for side, folder, archive in (("before", chosen.before, before), ("after", chosen.after, after)):
        console.print(Text(f"{side}: {folder}, {count_label(len(archive.frame), 'record')}"))
    _print_comparison(before, after, console)
    return ExitCode.OK


def _print_comparison(before: Archive, after: Archive, console: Console) -> None:
    names = _names(before, after)
    order = {key: place for place, key in enumerate(names)}
    found = sorted(changes(before, after), key=lambda change: order[change.key])
    for name, one, other in environment_differences(before, after):
        console.print(Text(f"{name} differs: {one} before, {other} after"))
    if found:
        console.print(_table(found, names))
        counts = Counter(change.outcome for change in found)
        console.print(Text(", ".join(f"{outcome}: {count:,}" for outcome, count in counts.most_common())))
        shared = any(shares_gpus(archive.frame) for archive in (before, after))
        for caveat in (*CAVEATS, SHARED_GPU_CAVEAT) if shared else CAVEATS:
            console.print(Text(caveat, style="dim"))
    else:
        console.print("no cell is in both sweeps")
    for where, missing in (("before", only_in(before, after)), ("after", only_in(after, before))):
        for line in _listed(missing, names, where):
            console.print(Text(line))


def _names(before: Archive, after: Archive) -> Mapping[Key, str]:
    """Each cell by its strategy, length and whatever sets it apart; by length and then strategy."""
    both = pd.concat([each.frame for each in (before, after) if len(each.frame)] or [before.frame])
    cells = both.drop_duplicates([*CELL]).sort_values(["seq_len", "strategy"], kind="stable")
    cells = cells.reset_index(drop=True)
    keys = zip(*(cells[name] for name in CELL), strict=True)
    lengths = (length_label(int(length)) for length in cells["seq_len"])
    names = cell_names(cells, *keys_and_number(cells))
    return {key: f"{name}, {length}" for key, name, length in zip(keys, names, lengths, strict=True)}


def _table(found: Sequence[Change], names: Mapping[Key, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold", min_width=12)
    table.add_column("speed", justify="right", no_wrap=True)
    for heading in ("95 % interval", "n", "outcome"):
        table.add_column(heading, overflow="fold")
    for change in found:
        table.add_row(*map(Text, (names[change.key], *_numbers(change), change.outcome)))
    return table


def _numbers(change: Change) -> tuple[str, str, str]:
    """Ratio, interval and numbers of samples in a reader's words; empty where there is no ratio."""
    ratio = change.ratio
    if ratio is None:
        return "", "", ""
    interval = "none" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"{ratio.value:.3f}", interval, f"{change.n[0]}, {change.n[1]} {change.n_of}"


def _listed(missing: Sequence[Key], names: Mapping[Key, str], where: str) -> list[str]:
    """The cells of one side alone, the first of too many."""
    if not missing:
        return []
    rest = len(missing) - MAX_LISTED
    lines = [f"  {names[key]} ({key[0]})" for key in missing[:MAX_LISTED]]
    more = [f"  {more_label(rest, 'cell')}"] if rest > 0 else []
    return [f"only {where}: {count_label(len(missing), 'cell')}", *lines, *more]


if __name__ == "__main__":
    sys.exit(main())
