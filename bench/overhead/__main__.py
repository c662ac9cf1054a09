"""What the harness itself costs: `python -m bench.overhead`; exits 1 unless it meets its own goals.

Fixed cost of a cell: its wall time less its own steps and checks, on 4 CPU ranks, against the same worker
started by torchrun, in turns in one run. Cost of a step: under the harness and under each instrument against
a bare loop, on 2 CPU ranks, in turns in one set of processes, until the interval is narrow enough to decide.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cell.launcher import Launcher
from bench.command import tool_words
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.node.lease import add_lease_option, lease_of
from bench.overhead.cells import CELL_WORDS, fixed_costs
from bench.overhead.comparison import step_costs
from bench.overhead.goal import FULL, SHORT, Goal
from bench.request import values
from bench.request.composition import composed
from bench.request.resolve import resolve

STEP_WORDS = ("seq_len=1k", "cluster=cpu", "cluster.world_size=2", "engine=ddp")
"""Short steps: they show a fixed cost best, and more of them in a minute outweigh that each is noisier."""
START_S = 600
"""What the ranks have beyond the minutes, to start in and to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How much the command runs."""

    goal: Goal
    """Of a timed step against a bare one."""
    minutes: float
    """At most so many in all, unless others are asked for."""
    instrument_rounds: int
    with_cells: bool


WHOLE_FORM = Form(goal=FULL, minutes=10, instrument_rounds=30, with_cells=True)
SHORT_FORM = Form(goal=SHORT, minutes=1, instrument_rounds=0, with_cells=False)


def main(words: Sequence[str] | None = None, launcher: Launcher | None = None) -> None:
    """Print the costs, what is missed of the goals and what is undecided; exit 1 where something is."""
    arguments = _arguments(words)
    form = SHORT_FORM if arguments.short else WHOLE_FORM
    try:
        minutes = form.minutes
        if arguments.minutes is not None:
            minutes = values.positive("--minutes", arguments.minutes, example="10")
        repeats = values.whole("--repeats", arguments.repeats)
        cell, step_cell = _cell(arguments.words), _step_cell(arguments.words, minutes)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    # Steps run under DDP: DeepSpeed, which takes long to import, is for cells.
    launcher = launcher or Launcher(None if form.with_cells else ())
    try:
        with lease_of(arguments, [cell, step_cell]):
            deadline_s = time.monotonic() + 60 * minutes
            missed = _report_cells(cell, launcher, repeats) if form.with_cells else []
            costs = step_costs(step_cell, launcher, form.goal, deadline_s, form.instrument_rounds)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    print("\n".join(costs.lines(step_cell)))
    sys.exit(_end([*missed, *costs.missed(form.goal)], costs.undecided(form.goal, minutes)))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words("bench.overhead"), description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="cells of each kind, in turns")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"at most so many in all; {WHOLE_FORM.minutes} unless said, {SHORT_FORM.minutes} with --short",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="timed and bare steps only, held to wider limits: after every change",
    )
    add_lease_option(parser)
    parser.add_argument("words", nargs="*", help="the cell, e.g. strategy=ulysses engine=fsdp2")
    return parser.parse_args(words)


def _cell(words: Sequence[str]) -> RunConfig:
    return resolve(composed(*CELL_WORDS, *words), this_machine())


def _step_cell(words: Sequence[str], minutes: float) -> RunConfig:
    timeout_s = START_S + math.ceil(60 * minutes)
    return resolve(composed(*words, *STEP_WORDS, f"measure.timeout_s={timeout_s}"), this_machine())


def _report_cells(cell: RunConfig, launcher: Launcher, repeats: int) -> list[str]:
    """Print the fixed costs; what is missed of their goals."""
    costs = fixed_costs(cell, launcher, repeats)
    print("\n".join(costs.lines(cell)), flush=True)
    return costs.missed()


def _end(missed: Sequence[str], undecided: Sequence[str]) -> ExitCode:
    """Print what became of the goals."""
    if missed:
        print("missed: " + "; ".join(missed))
    for line in undecided:
        print(line)
    if not missed and not undecided:
        print("all goals met")
    return ExitCode.FAILED if missed or undecided else ExitCode.OK


if __name__ == "__main__":
    main()
