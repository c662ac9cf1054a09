"""Compare two sweeps cell by cell: `python -m analysis.compare BEFORE AFTER`."""

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
from analysis.cells.difference import Processes, SpeedDifference, processes_of, speed_difference
from analysis.cells.gate import GateVerdict, slowdown_limit, speed_verdict, sweep_verdict
from analysis.cells.series import cell_names, keys_and_number
from analysis.labels import count_label, more_label, number_label, status_label, table_console
from analysis.read.archive import Archive, read_archive
from analysis.read.hardware import peak_flops_per_s
from bench.common.command import outlive_readers, tool_command
from bench.common.environment import Environment
from bench.common.labels import duration_label, length_label
from bench.common.statistics import MIN_PROCESSES
from bench.config import ConfigError, ExitCode
from bench.record.record import Provenance, Status
from bench.record.store import StoreError

CELL_COLUMNS = ("cell_id", "provenance")
"""Columns that identify a cell in both sweeps. The machine may differ; the output then names both."""
NOT_COMPARED = frozenset({"argv", "packages", "inherited_env"})
"""Fields of an environment that are not compared as a whole; packages and variables are compared singly."""

CellKey = tuple[str, str]
"""Values of CELL_COLUMNS."""
NOT_RECORDED = "not recorded"
SPEED_NOTES = (
    "unstable",
    "very unstable",
    "the machine was busy",
    "throttled",
    "warmed up with shorter steps",
)
"""First words of the notes that make a ratio of speeds less reliable."""
MAX_LISTED = 50
CAVEATS = (
    "Speed: tokens/s after over before, the median ratio of all pairs of processes, with its 95 % interval.",
    "Two values in a column are the values before and after.",
    f"A cell is undecided without {MIN_PROCESSES} or more interleaved processes on each side.",
    "Among twenty unchanged cells, expect one that looks faster or slower by chance.",
)
WAY_TO_DECIDE = (
    "To decide, interleave both sweeps: run each with measure.repeats=1, then each again with"
    f" measure.repeats=2 resume=true sweep_dir=..., and so on up to {MIN_PROCESSES} (about {{duration}})."
)


@dataclass(frozen=True, slots=True)
class CellInSweep:
    """One cell in one of the two sweeps."""

    status: str
    processes: Processes
    load: float | None
    """Highest load average of the machine when timing began in a process; None if not recorded."""
    notes: tuple[str, ...]
    """Warnings on the steps and the machine, such as `unstable`."""
    devices: frozenset[str]
    """Names of the devices that the cell ran on; empty if predicted or not recorded."""


@dataclass(frozen=True, slots=True)
class CellChange:
    """One cell in both sweeps."""

    key: CellKey
    before: CellInSweep
    after: CellInSweep
    difference: SpeedDifference | None
    """Speed after over speed before; None if a side has no speed. Predictions have no interval."""

    @property
    def is_predicted(self) -> bool:
        """Whether the cell is predicted; it then has no processes, and every difference counts."""
        return self.key[1] == Provenance.PREDICTED

    @property
    def outcome(self) -> str:
        """Result of the comparison in words, such as `faster` or `was ok, is OOM`."""
        before, after = (status_label(side.status) for side in (self.before, self.after))
        if before != after:
            return f"was {before}, is {after}"
        if self.difference is None:
            return f"{before} in both"
        if self.difference.undecided is not None:
            return f"undecided: {self.difference.undecided}"
        if self.is_predicted:
            return "predicted the same" if self.difference.ratio == 1 else "predicted differently"
        if self.difference.is_faster:
            return "faster"
        return "slower" if self.difference.is_slower else "no clear difference"


def cell_changes(before: Archive, after: Archive) -> list[CellChange]:
    """Return the change of every cell that is in both archives, in the order of the first archive."""
    rows_before, rows_after = _rows_by_cell(before), _rows_by_cell(after)
    return [
        _change(key, _cell_in_sweep(before, rows), _cell_in_sweep(after, rows_after[key]))
        for key, rows in rows_before.items()
        if key in rows_after
    ]


def gate_verdicts(before: Archive, after: Archive, limit: float) -> dict[CellKey, tuple[GateVerdict, str]]:
    """Return verdict and reason of every cell that was `ok` before, by whether it lost more than `limit`.

    Cells that failed before have no speed to lose, and cells that are only in `after` have none to compare.
    """
    missing = (GateVerdict.UNDECIDED, "not in the second sweep")
    verdicts = {key: missing for key in _rows_by_cell(before) if key not in _rows_by_cell(after)}
    changes = [change for change in cell_changes(before, after) if change.before.status == Status.OK]
    return verdicts | {change.key: _gate_verdict(change, limit) for change in changes}


def _gate_verdict(change: CellChange, limit: float) -> tuple[GateVerdict, str]:
    """Return verdict and reason of one cell that was `ok` before."""
    before, after, speed = change.before, change.after, change.difference
    if before.devices != after.devices:
        names = (" and ".join(sorted(side.devices)) or NOT_RECORDED for side in (before, after))
        return GateVerdict.UNDECIDED, "device: {} before, {} after".format(*names)
    if after.status != Status.OK:
        is_stopped = after.status == Status.INTERRUPTED
        return GateVerdict.UNDECIDED if is_stopped else GateVerdict.SLOWER, change.outcome
    if speed is None or speed.ratio is None:
        return GateVerdict.UNDECIDED, (speed and speed.undecided) or "no speed"
    if change.is_predicted:
        speed = SpeedDifference(None, speed.ratio, low=speed.ratio, high=speed.ratio)
    return speed_verdict(speed, limit), f"speed {speed.ratio:.3f}, {speed.low:.3f} to {speed.high:.3f}"


def environment_differences(before: Archive, after: Archive) -> list[str]:
    """Return a sentence for every value of code, software and machine that differs between the archives."""
    old, new = (_environment_values(archive.environments) for archive in (before, after))
    return [
        f"{name} differs: {old.get(name, NOT_RECORDED)} before, {new.get(name, NOT_RECORDED)} after"
        for name in {**old, **new}
        if old.get(name, NOT_RECORDED) != new.get(name, NOT_RECORDED)
    ]


def _rows_by_cell(archive: Archive) -> dict[CellKey, pd.Index[int]]:
    """Return the rows of every cell's records, without synthetic records, which no device made."""
    frame = archive.frame[archive.frame["provenance"].ne(Provenance.SYNTHETIC)]
    groups = frame.groupby([*CELL_COLUMNS], sort=False)
    return {(str(cell_id), str(provenance)): rows.index for (cell_id, provenance), rows in groups}


def _change(key: CellKey, before: CellInSweep, after: CellInSweep) -> CellChange:
    """Compare both sides of a cell; see `CellChange.difference` for sides without speeds or processes."""
    if not before.processes or not after.processes:
        return CellChange(key, before, after, None)
    if key[1] == Provenance.PREDICTED:  # a prediction has one speed and no processes
        ratio = after.processes.tokens_per_s[0] / before.processes.tokens_per_s[0]
        return CellChange(key, before, after, SpeedDifference(None, ratio))
    return CellChange(key, before, after, speed_difference(after.processes, before.processes))


def _cell_in_sweep(archive: Archive, rows: pd.Index[int]) -> CellInSweep:
    """Return one cell of an archive; its status is that of the first failed repeat, if any failed."""
    records = archive.frame.loc[rows]
    timed = records[(records["status"] == "ok") & records["tokens_per_s"].notna()]
    telemetries = (archive.record(row).telemetry for row in rows)
    loads = [telemetry.load_average for telemetry in telemetries if telemetry is not None]
    return CellInSweep(
        status=next((status for status in records["status"] if status != "ok"), "ok"),
        processes=processes_of(timed),
        load=max(loads, default=None),
        notes=tuple(dict.fromkeys(_speed_notes(timed["note"]))),
        devices=frozenset(records["device_name"].dropna()),
    )


def _speed_notes(notes: pd.Series[str]) -> list[str]:
    """Return the first words of the notes on speeds, such as `unstable` or `the machine was busy`."""
    parts = [part.partition(":")[0] for note in notes.dropna() for part in note.split("; ")]
    return [part for part in parts if part.startswith(SPEED_NOTES)]


def _environment_values(environments: Sequence[Environment]) -> dict[str, str]:
    """Return the distinct values of every field, package and variable by name, joined with `and`."""
    seen: dict[str, dict[str, None]] = {}
    for environment in environments:
        flat = {name: value for name, value in to_builtins(environment).items() if name not in NOT_COMPARED}
        for name, value in {**flat, **environment.packages, **environment.inherited_env}.items():
            if value is not None:
                seen.setdefault(name, {})[str(value)] = None
    return {name: " and ".join(values) for name, values in seen.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog=tool_command("analysis.compare"), description=__doc__)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="folder of a sweep")
    parser.add_argument("after", type=Path, metavar="AFTER", help="folder of another sweep")
    parser.add_argument(
        "--fail-if-slower",
        metavar="N%",
        help="exit with 1 if a cell of AFTER is slower by more than N %%, with 3 if that is undecided",
    )
    chosen = parser.parse_args(arguments)
    try:
        limit = None if chosen.fail_if_slower is None else slowdown_limit(chosen.fail_if_slower)
        peaks = peak_flops_per_s()
        before, after = (read_archive([folder], peaks) for folder in (chosen.before, chosen.after))
    except (ConfigError, StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    console = table_console()
    for side, folder, archive in (("before", chosen.before, before), ("after", chosen.after, after)):
        console.print(Text(f"{side}: {folder}, {count_label(len(archive.frame), 'record')}"))
    _print_comparison(before, after, console)
    return ExitCode.OK if limit is None else _gate(before, after, limit)


def _gate(before: Archive, after: Archive, limit: float) -> int:
    """Print a line for every cell that did not pass and one on the sweep; return the exit code."""
    if not _rows_by_cell(before).keys() & _rows_by_cell(after).keys():
        print("--fail-if-slower: no cell is in both sweeps; run both with the same settings", file=sys.stderr)
        return ExitCode.INVALID_REQUEST
    names, verdicts = _cell_names(before, after), gate_verdicts(before, after, limit)
    for key, (verdict, reason) in verdicts.items():
        if verdict != GateVerdict.PASSED:
            print(f"{verdict.name.lower()}: {names[key]}: {reason}")
    verdict = sweep_verdict(verdict for verdict, _ in verdicts.values())
    counts = Counter(verdict for verdict, _ in verdicts.values())
    listed = ", ".join(f"{counts[kind]} {kind.name.lower()}" for kind in GateVerdict)
    print(f"--fail-if-slower {100 * limit:g}%: {verdict.name.lower()} ({listed})")
    return verdict


def _print_comparison(before: Archive, after: Archive, console: Console) -> None:
    """Print differing environments, the table of cells in both sweeps, caveats, and the other cells."""
    names = _cell_names(before, after)
    order = {key: place for place, key in enumerate(names)}
    compared = sorted(cell_changes(before, after), key=lambda change: order[change.key])
    for line in environment_differences(before, after):
        console.print(Text(line))
    if compared:
        console.print(_table(compared, names))
        counts = Counter(change.outcome for change in compared)
        console.print(Text(", ".join(f"{outcome}: {count:,}" for outcome, count in counts.most_common())))
        shared = any(shares_gpus(archive.frame) for archive in (before, after))
        caveats = () if all(change.is_predicted for change in compared) else CAVEATS
        if any(change.key[1] == Provenance.REPLAYED for change in compared):
            caveats = (*caveats, "Replayed cells are compared by the steps of one rank, without the link.")
        for caveat in (*caveats, SHARED_GPU_CAVEAT) if shared else caveats:
            console.print(Text(caveat, style="dim"))
        if any(change.difference and change.difference.undecided for change in compared):
            console.print(Text(_way_to_decide(before, after)))
    else:
        console.print("no cell is in both sweeps")
    keys = {"before": _rows_by_cell(before).keys(), "after": _rows_by_cell(after).keys()}
    for side, other in (("before", "after"), ("after", "before")):
        missing = [key for key in keys[side] if key not in keys[other]]
        for line in _lines_of_missing(missing, names, side):
            console.print(Text(line))


def _cell_names(before: Archive, after: Archive) -> Mapping[CellKey, str]:
    """Return a name for every cell with its strategy, length and distinguishing settings.

    The order is by length, then by strategy.
    """
    both = pd.concat([side.frame for side in (before, after) if len(side.frame)] or [before.frame])
    both = both.assign(code=None, torch=None)  # the sides may differ in these, so names leave them out
    cells = both.drop_duplicates([*CELL_COLUMNS]).sort_values(["seq_len", "strategy"], kind="stable")
    cells = cells.reset_index(drop=True)
    keys = zip(*(cells[name] for name in CELL_COLUMNS), strict=True)
    lengths = (length_label(int(length)) for length in cells["seq_len"])
    names = cell_names(cells, *keys_and_number(cells))
    named = zip(keys, names, lengths, cells["provenance"], strict=True)
    return {
        key: f"{name}, {length}{', replayed' if provenance == Provenance.REPLAYED else ''}"
        for key, name, length, provenance in named
    }


def _way_to_decide(*sweeps: Archive) -> str:
    """Return how to decide, and how long this takes, estimated from the times of the cells."""
    totals_s = (
        MIN_PROCESSES * sweep.frame.groupby([*CELL_COLUMNS])["wall_s"].median().sum() for sweep in sweeps
    )
    return WAY_TO_DECIDE.format(duration=duration_label(float(sum(totals_s))))


def _table(compared: Sequence[CellChange], names: Mapping[CellKey, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cell", overflow="fold", min_width=12)
    for heading in ("tokens/s", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("95 % interval", "processes", "outcome", "load", "note"):
        table.add_column(heading, overflow="fold")
    for change in compared:
        rest = (change.outcome, _load_text(change), _note_text(change))
        table.add_row(*map(Text, (names[change.key], *_number_texts(change), *rest)))
    return table


def _number_texts(change: CellChange) -> list[str]:
    """Return both rates, their ratio, its interval and the numbers of processes as texts, or empty texts."""
    speed, sides = change.difference, (change.before, change.after)
    if speed is None:
        return [""] * 4
    rates = ", ".join(number_label(statistics.median(side.processes.tokens_per_s)) for side in sides)
    counts = "" if change.is_predicted else ", ".join(str(len(side.processes)) for side in sides)
    if speed.ratio is None:
        return [rates, "", "none", counts]
    interval = "" if change.is_predicted else f"{speed.low:.3f} to {speed.high:.3f}"
    return [rates, f"{speed.ratio:.3f}", interval, counts]


def _load_text(change: CellChange) -> str:
    """Return the load averages before and after, `0.9, 4.1`; `?` stands for an unknown one."""
    loads = (change.before.load, change.after.load)
    return "" if loads == (None, None) else ", ".join(number_label(load) or "?" for load in loads)


def _note_text(change: CellChange) -> str:
    """Return the notes of both sides: `before: unstable; after: the machine was busy`."""
    sides = (("before", change.before), ("after", change.after))
    return "; ".join(f"{name}: {', '.join(side.notes)}" for name, side in sides if side.notes)


def _lines_of_missing(missing: Sequence[CellKey], names: Mapping[CellKey, str], side: str) -> list[str]:
    """Return lines with the first MAX_LISTED of the `missing` cells, which only `side` has."""
    if not missing:
        return []
    rest = len(missing) - MAX_LISTED
    lines = [f"  {names[key]} ({key[0]})" for key in missing[:MAX_LISTED]]
    more = [f"  {more_label(rest, 'cell')}"] if rest > 0 else []
    return [f"only {side}: {count_label(len(missing), 'cell')}", *lines, *more]


if __name__ == "__main__":
    sys.exit(main())
