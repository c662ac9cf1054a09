"""How good the cost model is: `python -m bench.accuracy`; exits 1 where it misses its goals.

The cells of a list are measured by an ordinary sweep, their repeats in turns, and set beside their
predictions: median error under 10 % in step time, under 5 % in peak allocated, every verdict on memory right.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from bench.accuracy.comparison import compared, missed, score_lines, table
from bench.cell.launcher import Launcher
from bench.cell.planned import PlannedCell
from bench.command import tool_words
from bench.config import ConfigError, ExitCode, Resume, RunConfig, WhenTaken
from bench.cost.hardware import hardware_from
from bench.environment import REPOSITORY, Machine, this_machine
from bench.node.lease import add_lease_option
from bench.request import values
from bench.request.composition import composed
from bench.request.hardware import calibrated_facts
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.store import StoreError, read_records
from bench.sweep.plan import Plan
from bench.sweep.progress import Progress
from bench.sweep.repeats import in_turns
from bench.sweep.run import run_plan

CELLS = REPOSITORY / "tests/bench/cost/comparison_cells.yaml"
"""A list of cells is a file of command lines."""
RECORDS = "records.jsonl"


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, the score and what is missed of the goals."""
    arguments = _arguments(words)
    try:
        hardware = hardware_from(calibrated_facts(arguments.hardware))
        listed = listed_cells(arguments.cells, this_machine())
        if not arguments.only_compare:
            repeats = values.whole("--repeats", arguments.repeats)
            _measure([*listed.values()], arguments.folder, repeats, WhenTaken(arguments.lease))
        records = read_records(arguments.folder / RECORDS)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    rows = compared(listed, records, hardware)
    print("\n".join([*table(rows), *score_lines(rows)]))
    faults = missed(rows)
    if len(rows) < len(listed):
        faults.append(f"{len(listed) - len(rows)} of {len(listed)} cells have no record or no prediction")
    print("missed: " + "; ".join(faults) if faults else "all goals met")
    sys.exit(ExitCode.FAILED if faults else ExitCode.OK)


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


def listed_cells(file: Path, machine: Machine) -> dict[str, RunConfig]:
    """The cells of a list, in its order, by what each is asked for with beside the words of all.

    Raises ConfigError for a file that is no list, and for a cell that is not legal here.
    """
    if not file.is_file():
        raise ConfigError(f"--cells={file}: no such file; leave it out for {CELLS.relative_to(REPOSITORY)}")
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(content, dict) or {*content} != {"common", "cells"}:
        raise ConfigError(f"--cells={file}: must hold `common` words and a list of `cells`; see {CELLS.name}")
    cells = {}
    for line in content["cells"]:
        cell = cells[line] = resolve(composed(*shlex.split(f"{content['common']} {line}")), machine)
        reason = refusal(cell)
        if reason is not None:
            raise ConfigError(f"{file.name}: {line}: {reason}")
    return cells


def _measure(cells: Sequence[RunConfig], folder: Path, repeats: int, lease: WhenTaken) -> None:
    """Run what the folder does not have yet."""
    turns = in_turns(cells, range(repeats))
    planned = tuple(PlannedCell(cell, repeat, order) for order, (cell, repeat) in enumerate(turns))
    resume = Resume.MATCHING if folder.exists() else Resume.NEVER
    plan = Plan(planned, folder, resume, lease)
    code = run_plan(plan, Launcher(), Progress(Console()), write_report=lambda _: True)
    if code is ExitCode.INTERRUPTED:
        sys.exit(code)


if __name__ == "__main__":
    main()
