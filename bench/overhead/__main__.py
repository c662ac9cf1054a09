"""What the harness itself costs: `python -m bench.overhead`; exits 1 where it misses its own goals.

Fixed cost of a cell: its wall time less its own steps and checks, on 4 CPU ranks, against the same worker
started by torchrun, in turns in one run. Cost of a step: under the harness against a bare loop, on 2 CPU
ranks, in turns in one set of processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.cell.launcher import Launcher
from bench.command import tool_words
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.node.lease import add_lease_option, lease_of
from bench.overhead.cells import CELL_WORDS, fixed_costs
from bench.overhead.comparison import ROUNDS, step_costs
from bench.request import values
from bench.request.composition import composed
from bench.request.resolve import resolve

STEP_WORDS = ("seq_len=1k", "cluster=cpu", "cluster.world_size=2", "engine=ddp")
"""Short steps: they show a fixed cost best, and more of them in a minute outweigh that each is noisier."""


def main(words: Sequence[str] | None = None, launcher: Launcher | None = None) -> None:
    """Print the costs, and what is missed of the goals; exit 1 where something is."""
    arguments = _arguments(words)
    is_short = arguments.short
    launcher = launcher or Launcher()
    try:
        repeats = values.whole("--repeats", arguments.repeats)
        cell = resolve(composed(*CELL_WORDS, *arguments.words), this_machine())
        step_cell = resolve(composed(*arguments.words, *STEP_WORDS), this_machine())
        with lease_of(arguments, [cell, step_cell]):
            missed = [] if is_short else _report_cells(cell, launcher, repeats)
            costs = step_costs(step_cell, launcher, ROUNDS)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    print("\n".join(costs.lines(step_cell)))
    missed += costs.missed()
    print(f"missed: {'; '.join(missed)}" if missed else costs.noise or "all goals met")
    sys.exit(ExitCode.FAILED if missed else ExitCode.OK)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words("bench.overhead"), description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="cells of each kind, in turns")
    parser.add_argument("--short", action="store_true", help="timed and bare steps only: after every change")
    add_lease_option(parser)
    parser.add_argument("words", nargs="*", help="the cell, e.g. strategy=ulysses engine=fsdp2")
    return parser.parse_args(words)


def _report_cells(cell: RunConfig, launcher: Launcher, repeats: int) -> list[str]:
    """Print the fixed costs; what is missed of their goals."""
    costs = fixed_costs(cell, launcher, repeats)
    print("\n".join(costs.lines(cell)), flush=True)
    return costs.missed()


if __name__ == "__main__":
    main()
