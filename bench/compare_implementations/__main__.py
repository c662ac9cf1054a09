"""Every implementation side by side: `python -m bench.compare_implementations`; exits 1 where ours is slower.

One attention call, forward and backward, with the same inputs and kernel on the same ranks: ours and those
of the packages that are installed here, in turns, in sets of fresh processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.command import tool_words
from bench.compare_implementations.comparison import Row, rows_of
from bench.compare_implementations.entrants import Entrant, Refused, Setting, entrants, settings
from bench.compare_implementations.processes import played
from bench.compare_implementations.table import FILE, NOTE, markdown, write
from bench.config import ConfigError, ExitCode
from bench.environment import describe, installed, this_machine
from bench.node.lease import add_lease_option, lease_of
from bench.request import values
from bench.statistics import MIN_PROCESSES
from bench.strategies import STRATEGIES

Compared = tuple[Setting, list[Entrant], list[Refused]]


def main(words: Sequence[str] | None = None) -> None:
    """Print a table for every setting, and where ours is slower."""
    arguments = _arguments(words)
    try:
        processes = values.whole("--processes", arguments.processes, least=1)
        budget_s = values.positive("--budget-s", arguments.budget_s, example="20")
        _refuse_existing(arguments.output)
        compared = _compared(arguments)
        cells = [entrant.cell for _, playing, _ in compared for entrant in playing]
        with lease_of(arguments, cells):
            rows = _all_rows(compared, processes, budget_s, arguments.output)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    print(NOTE)
    slower = [row for row in rows if row.is_ours_slower]
    for row in slower:
        print(f"{row.counterpart} is slower than {row.implementation}: {row.verdict}")
    sys.exit(ExitCode.FAILED if slower else ExitCode.OK)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words("bench.compare_implementations"), description=__doc__)
    parser.add_argument("--lengths", default="1k,4k", help="of the whole sequence, such as 1k,4k,16k")
    parser.add_argument("--ranks", default="2,4", help="how many share a sequence")
    parser.add_argument("--heads", default="4/2", help="query heads and KV heads, such as 4/2,16/16")
    parser.add_argument("--processes", type=int, default=MIN_PROCESSES, help="sets of fresh processes")
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds of turns in each set")
    parser.add_argument("--output", type=Path, help=f"a new folder for {FILE}")
    add_lease_option(parser)
    parser.add_argument("words", nargs="*", help="the cell, e.g. dtype=fp32 model=qwen3_nano")
    return parser.parse_args(words)


def _refuse_existing(folder: Path | None) -> None:
    if folder is not None and (folder / FILE).exists():
        raise ConfigError(f"--output={folder}: it holds {FILE} already; name a new folder")


def _compared(arguments: argparse.Namespace) -> list[Compared]:
    found = settings(arguments.ranks, arguments.lengths, arguments.heads)
    return [(setting, *entrants(setting, arguments.words, this_machine())) for setting in found]


def _all_rows(
    compared: Sequence[Compared], processes: int, budget_s: float, output: Path | None
) -> list[Row]:
    launcher, rows, environment = Launcher(), list[Row](), describe({})
    for setting, playing, refused in compared:
        turns = played(launcher, playing, budget_s, processes)
        found = rows_of(setting, turns.playing, turns.sets, _packages(turns.playing))
        dtype = playing[0].cell.dtype
        found += [
            Row(
                **asdict(setting), dtype=dtype, implementation=each.label, package=None, counterpart=None,
                reason=each.reason,
            )
            for each in (*turns.refused, *refused)
        ]  # fmt: skip
        rows += found
        print("\n".join(markdown(found)), flush=True)
        if output is not None:
            write(output, environment, rows)
    return rows


def _packages(playing: Sequence[Entrant]) -> dict[str, str | None]:
    """By label the package whose code runs, with its version."""
    found = dict[str, str | None]()
    for entrant in playing:
        package = STRATEGIES[entrant.cell.strategy].package
        found[entrant.label] = None if package is None else f"{package} {installed(package)}"
    return found


if __name__ == "__main__":
    main()
