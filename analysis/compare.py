"""What changed between two sweeps, cell by cell: `python -m analysis.compare BEFORE AFTER`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from msgspec import to_builtins
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.cells.cells import SHARED_GPU_CAVEAT, shares_gpus
from analysis.cells.difference import Processes, SpeedDifference, difference, processes_of
from analysis.cells.series import cell_names, keys_and_number
from analysis.labels import count_label, more_label, number_label, status_label
from analysis.read.archive import Archive, read_archive
from analysis.read.hardware import peak_flops_per_s
from bench.common.command import outlive_readers, tool_words
from bench.common.environment import Environment
from bench.common.labels import duration_label, length_label
from bench.common.statistics import MIN_PROCESSES
from bench.config import ExitCode
from bench.record.record import Provenance
from bench.record.store import StoreError

CELL = ("cell_id", "provenance")
"""Columns that two records of one cell agree in. The machine may differ, and is named then."""
NOT_COMPARED = frozenset({"argv", "packages", "inherited_env"})

Key = tuple[str, str]

NOT_RECORDED = "not recorded"
ON_SPEED = ("unstable", "very unstable", "the machine was busy", "throttled", "warmed up with shorter steps")
"""First words of the notes that matter for a ratio of speeds."""
MAX_LISTED = 50
CAVEATS = (
    "Speed: tokens/s after over before, the median ratio of all pairs of processes, with its 95 % interval.",
    f"It takes {MIN_PROCESSES} or more processes of a cell a side, the sweeps in turns; else undecided.",
    "Of twenty cells in which nothing changed, one may well look faster or slower.",
)
IN_TURNS = (
    "To decide, let both sweeps take turns: run each with measure.repeats=1, then each again with"
    f" measure.repeats=2 resume=true sweep_dir=..., and so on up to {MIN_PROCESSES} (about {{duration}})."
)


@dataclass(frozen=True, slots=True)
class Side:
    """One cell in one of the sweeps."""

    status: str
    processes: Processes
    load: float | None
    """The machine's load average when timing began, the highest of all processes; None where not recorded."""
    notes: tuple[str, ...]
    """Warnings on its steps and its machine, such as `unstable`."""


@dataclass(frozen=True, slots=True)
class CellChange:
    """One cell in both sweeps."""

    key: Key
    before: Side
    after: Side
    difference: SpeedDifference | None
    """Ratio of speeds, after over before; None where a side has no speed. Predictions have no interval."""

    @property
    def is_predicted(self) -> bool:
        """Whether it is arithmetic, which has no processes: then any other figure is another prediction."""
        return self.key[1] == Provenance.PREDICTED

    @property
    def outcome(self) -> str:
        before, after = (status_label(side.status) for side in (self.before, self.after))
        if before != after:
            return f"was {before}, is {after}"
        if self.difference is None:
            return f"{before} in both"
        if self.difference.undecided is not None:
            return f"undecided: {self.difference.undecided}"
        if self.is_predicted:
            return "predicted the same" if self.difference.ratio == 1 else "predicted otherwise"
        if self.difference.is_faster:
            return "faster"
        return "slower" if self.difference.is_slower else "no clear difference"


def changes(before: Archive, after: Archive) -> list[CellChange]:
    """Every cell that is in both archives, in the order of the first."""
    rows_before, rows_after = _rows(before), _rows(after)
    return [
        _change(key, _side(before, rows), _side(after, rows_after[key]))
        for key, rows in rows_before.items()
        if key in rows_after
    ]


def environment_differences(before: Archive, after: Archive) -> list[tuple[str, str, str]]:
    """Name and both values of whatever differs between what the two ran in: code, software, machine."""
    values = [_environment_values(archive.environments) for archive in (before, after)]
    names = dict.fromkeys(name for each in values for name in each)
    pairs = [(name, *(each.get(name, NOT_RECORDED) for each in values)) for name in names]
    return [(name, one, other) for name, one, other in pairs if one != other]


def _rows(archive: Archive) -> dict[Key, pd.Index[int]]:
    """Return the rows of each cell's records, without synthetic ones, which are evidence for nothing."""
    frame = archive.frame[archive.frame["provenance"].ne(Provenance.SYNTHETIC)]
    return {(str(cell), str(how)): rows.index for (cell, how), rows in frame.groupby([*CELL], sort=False)}


def _change(key: Key, before: Side, after: Side) -> CellChange:
    if not before.processes or not after.processes:
        return CellChange(key, before, after, None)
    if key[1] == Provenance.PREDICTED:  # arithmetic has no processes
        ratio = after.processes.tokens_per_s[0] / before.processes.tokens_per_s[0]
        return CellChange(key, before, after, SpeedDifference(None, ratio))
    return CellChange(key, before, after, difference(after.processes, before.processes))


def _side(archive: Archive, rows: pd.Index[int]) -> Side:
    """One cell in one archive; its status is that of a failed repeat where there is one."""
    records = archive.frame.loc[rows]
    timed = records[(records["status"] == "ok") & records["tokens_per_s"].notna()]
    telemetries = (archive.record(row).telemetry for row in rows)
    loads = [each.load_average for each in telemetries if each is not None]
    return Side(
        status=next((status for status in records["status"] if status != "ok"), "ok"),
        processes=processes_of(timed),
        load=max(loads, default=None),
        notes=tuple(dict.fromkeys(_flags(timed["note"]))),
    )


def _flags(notes: pd.Series[str]) -> list[str]:
    """`unstable`, `the machine was busy`: what the notes on speeds begin with."""
    parts = [part.partition(":")[0] for note in notes.dropna() for part in note.split("; ")]
    return [part for part in parts if part.startswith(ON_SPEED)]


def _environment_values(environments: Sequence[Environment]) -> dict[str, str]:
    met: dict[str, dict[str, None]] = {}
    for environment in environments:
        flat = {name: value for name, value in to_builtins(environment).items() if name not in NOT_COMPARED}
        for name, value in {**flat, **environment.packages, **environment.inherited_env}.items():
            if value is not None:
                met.setdefault(name, {})[str(value)] = None
    return {name: " and ".join(values) for name, values in met.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog=tool_words("analysis.compare"), description=__doc__)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a sweep's folder")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another sweep's folder")
    chosen = parser.parse_args(arguments)
    try:
        peaks = peak_flops_per_s()
        before, after = (read_archive([folder], peaks) for folder in (chosen.before, chosen.after))
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
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
        caveats = () if all(change.is_predicted for change in found) else CAVEATS
        if any(change.key[1] == Provenance.REPLAYED for change in found):
            caveats = (*caveats, "Replayed cells are compared by the steps of one rank, without the link.")
        for caveat in (*caveats, SHARED_GPU_CAVEAT) if shared else caveats:
            console.print(Text(caveat, style="dim"))
        if any(change.difference and change.difference.undecided for change in found):
            console.print(Text(_way_to_decide(before, after)))
    else:
        console.print("no cell is in both sweeps")
    keys = {"before": _rows(before).keys(), "after": _rows(after).keys()}
    for where, other in (("before", "after"), ("after", "before")):
        missing = [key for key in keys[where] if key not in keys[other]]
        for line in _listed(missing, names, where):
            console.print(Text(line))


def _names(before: Archive, after: Archive) -> Mapping[Key, str]:
    """Each cell by its strategy, length and whatever sets it apart; by length and then strategy."""
    both = pd.concat([each.frame for each in (before, after) if len(each.frame)] or [before.frame])
    both = both.assign(code=None, torch=None)  # that they differ is what the two sides are compared for
    cells = both.drop_duplicates([*CELL]).sort_values(["seq_len", "strategy"], kind="stable")
    cells = cells.reset_index(drop=True)
    keys = zip(*(cells[name] for name in CELL), strict=True)
    lengths = (length_label(int(length)) for length in cells["seq_len"])
    names = cell_names(cells, *keys_and_number(cells))
    named = zip(keys, names, lengths, cells["provenance"], strict=True)
    return {
        key: f"{name}, {length}{', replayed' if provenance == Provenance.REPLAYED else ''}"
        for key, name, length, provenance in named
    }


def _way_to_decide(*sweeps: Archive) -> str:
    """How, and how long that takes by what the cells took."""
    whole_s = (MIN_PROCESSES * sweep.frame.groupby([*CELL])["wall_s"].median().sum() for sweep in sweeps)
    return IN_TURNS.format(duration=duration_label(float(sum(whole_s))))


def _table(found: Sequence[CellChange], names: Mapping[Key, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold", min_width=12)
    for heading in ("tokens/s", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("95 % interval", "processes", "outcome", "load", "note"):
        table.add_column(heading, overflow="fold")
    for change in found:
        rest = (change.outcome, _loads(change), _notes(change))
        table.add_row(*map(Text, (names[change.key], *_numbers(change), *rest)))
    return table


def _numbers(change: CellChange) -> tuple[str, str, str, str]:
    """Both rates, ratio, interval and numbers of processes; empty where there is none."""
    found, sides = change.difference, (change.before, change.after)
    if found is None:
        return "", "", "", ""
    rates = ", ".join(number_label(statistics.median(side.processes.tokens_per_s)) for side in sides)
    counts = "" if change.is_predicted else ", ".join(str(len(side.processes)) for side in sides)
    if found.ratio is None:
        return rates, "", "none", counts
    interval = "" if change.is_predicted else f"{found.low:.3f} to {found.high:.3f}"
    return rates, f"{found.ratio:.3f}", interval, counts


def _loads(change: CellChange) -> str:
    """`0.9, 4.1`: of both sides the highest load average when timing began."""
    loads = (change.before.load, change.after.load)
    return "" if loads == (None, None) else ", ".join(number_label(load) or "?" for load in loads)


def _notes(change: CellChange) -> str:
    """`before: unstable; after: the machine was busy`."""
    sides = (("before", change.before), ("after", change.after))
    return "; ".join(f"{name}: {', '.join(side.notes)}" for name, side in sides if side.notes)


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
