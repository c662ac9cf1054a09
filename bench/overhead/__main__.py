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

from bench.cell.launcher import Launcher
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.overhead.cells import CELL_WORDS, fixed_costs
from bench.overhead.comparison import step_costs
from bench.overhead.goal import FULL, SHORT
from bench.request import values
from bench.request.choices import composed
from bench.request.resolve import resolve

MINUTES = 10.0
SHORT_MINUTES = 1.0
STEP_WORDS = ("seq_len=1k", "cluster=cpu", "cluster.world_size=2", "engine=ddp")
"""Short steps: they show a fixed cost best, and more of them in a minute outweigh that each is noisier."""
START_S = 600
"""What the ranks have beyond the minutes, to start in and to end."""
INSTRUMENT_ROUNDS = 30


def main(words: Sequence[str] | None = None, launcher: Launcher | None = None) -> None:
    """Print the costs, what is missed of the goals and what is undecided; exit 1 where something is."""
    arguments = _arguments(words)
    goal, minutes = (SHORT, SHORT_MINUTES) if arguments.short else (FULL, MINUTES)
    try:
        values.whole("--repeats", arguments.repeats)
        if arguments.minutes is not None:
            minutes = values.positive("--minutes", arguments.minutes, example="10")
        cell = resolve(composed(*CELL_WORDS, *arguments.words), this_machine())
        timeout_s = START_S + math.ceil(60 * minutes)
        step_words = (*arguments.words, *STEP_WORDS, f"measure.timeout_s={timeout_s}")
        step_cell = resolve(composed(*step_words), this_machine())
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    deadline_s = time.monotonic() + 60 * minutes
    launcher = launcher or Launcher()
    missed = [] if arguments.short else _cells(cell, launcher, arguments.repeats)
    rounds = 0 if arguments.short else INSTRUMENT_ROUNDS
    costs = step_costs(step_cell, launcher, goal, deadline_s, rounds)
    print("\n".join(costs.lines(step_cell)))
    sys.exit(_end([*missed, *costs.missed(goal)], costs.undecided(goal, minutes)))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="cells of each kind, in turns")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"at most so many in all; {MINUTES:g} where nothing is said, {SHORT_MINUTES:g} with --short",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="only timed and bare steps, held to wide limits: for every change",
    )
    parser.add_argument("words", nargs="*", help="the cell, e.g. strategy=ulysses engine=fsdp2")
    return parser.parse_args(words)


def _cells(cell: RunConfig, launcher: Launcher, repeats: int) -> list[str]:
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
