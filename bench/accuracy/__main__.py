"""How good the cost model is: `python -m bench.accuracy`; exits 1 where it misses its goals.

The cells of a list are measured by an ordinary sweep, their repeats in turns, and set beside their
predictions: median error under 10 % in step time, under 5 % in peak allocated, every verdict on memory right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.accuracy.cells import CELLS, command_lines, listed_cells
from bench.accuracy.comparison import Score, compared, score_lines, table
from bench.cell.launcher import Launcher
from bench.cell.planned import PlannedCell
from bench.command import tool_words
from bench.config import ConfigError, ExitCode, Resume, RunConfig, WhenTaken
from bench.cost.hardware import hardware_from
from bench.environment import this_machine
from bench.node.lease import add_lease_option
from bench.request import values
from bench.request.hardware import calibrated_facts
from bench.store import StoreError, read_records
from bench.sweep.plan import Plan
from bench.sweep.progress import Progress
from bench.sweep.repeats import in_turns
from bench.sweep.run import run_plan

RECORDS = "records.jsonl"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, the score and what is missed of the goals."""
    arguments = _arguments(words)
    try:
        hardware = hardware_from(calibrated_facts(arguments.hardware))
        lines, cells = command_lines(arguments.cells), listed_cells(arguments.cells, this_machine())
        if not arguments.only_compare:
            repeats = values.whole("--repeats", arguments.repeats)
            _measure(cells, arguments.folder, repeats, WhenTaken(arguments.lease))
        records = read_records(arguments.folder / RECORDS)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    rows = compared(lines, cells, records, hardware)
    score = Score.of(rows)
    print("\n".join([*table(rows), *score_lines(score)]))
    missed = score.missed()
    if len(rows) < len(cells):
        missed.append(f"{len(cells) - len(rows)} of {len(cells)} cells have no record or no prediction")
    print("missed: " + "; ".join(missed) if missed else "all goals met")
    sys.exit(ExitCode.FAILED if missed else ExitCode.OK)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words("bench.accuracy"), description=__doc__)
    parser.add_argument("--cells", type=Path, default=CELLS, help="the list of cells")
    parser.add_argument(
        "--hardware", required=True, help="the file that python -m bench.calibrate wrote here"
    )
    parser.add_argument("--repeats", type=int, default=3, help="processes of each cell, in turns")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("results/sweeps/accuracy"),
        help="its records; what is there stays",
    )
    add_lease_option(parser)
    parser.add_argument("--only-compare", action="store_true", help="measure nothing: the folder has it all")
    return parser.parse_args(words)


def _measure(cells: Sequence[RunConfig], folder: Path, repeats: int, lease: WhenTaken) -> None:
    """Run what the folder does not have yet."""
    turns = in_turns(cells, range(repeats))
    planned = tuple(PlannedCell(cell, repeat, order) for order, (cell, repeat) in enumerate(turns))
    resume = Resume.MATCHING if folder.exists() else Resume.NEVER
    plan = Plan(planned, folder, resume, lease)
    code = run_plan(plan, Launcher(plan.packages), Progress(Console()), write_report=lambda _: True)
    if code is ExitCode.INTERRUPTED:
        sys.exit(code)


if __name__ == "__main__":
    main()
