"""What this machine can do: `python -m bench.calibrate`; saved as a hardware file for predictions.

Matrix products, attention's blocks, a layer's other operations, an optimizer's updates, engines' hooks and
messages are timed by size on all ranks at once. No training step runs, and no strategy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.calibrate.entry import calibrate
from bench.calibrate.file import calibration_text, exchange_lines
from bench.calibrate.grid import GRIDS
from bench.cell.launcher import Launcher
from bench.command import sweep_words, tool_words
from bench.config import ConfigError, ExitCode, RunConfig
from bench.environment import this_machine
from bench.node.lease import add_lease_option, lease_of
from bench.request import values
from bench.request.composition import composed
from bench.request.legality import refusal
from bench.request.resolve import ENGINES, resolve

DTYPES = ("bf16", "fp32")


def main(words: Sequence[str] | None = None, launcher: Launcher | None = None) -> None:
    """Measure, print the messages as nccl-tests does, write the file."""
    arguments = _arguments(words)
    try:
        cell = _cell(arguments)
        with lease_of(arguments, [cell]):
            reports = _reports(cell, launcher or Launcher())
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    output = Path(arguments.output)
    output.write_text(calibration_text(output.stem, cell, reports))
    print("\n".join(exchange_lines(reports, cell.cluster.world_size)))
    print(f"{output}: {len(reports[0]['rows'])} figures in {reports[0]['took_s']:.0f} s")
    print(f"use it: {sweep_words()} mode=predict hardware=calibrated hardware.path={output}")


def _reports(cell: RunConfig, launcher: Launcher) -> list[dict[str, Any]]:
    """What each rank measured; ends the process where one has failed."""
    entry = partial(calibrate, grid=GRIDS[cell.cluster.device], dtypes=DTYPES, engines=ENGINES)
    with tempfile.TemporaryDirectory() as scratch:
        ends = launcher.run(cell, Path(scratch), entry=entry)
    reports = [end.report for end in ends if end.report is not None]
    if len(reports) < len(ends):
        failed = next(end for end in ends if end.report is None)
        sys.exit(f"calibration failed on rank {failed.rank}: {failed.why}")
    return reports


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=tool_words("bench.calibrate"), description=__doc__)
    parser.add_argument("--ranks", type=int, help="all GPUs of this machine, or 2 on the CPU")
    parser.add_argument("--output", default="calibrated.yaml", help="the hardware file to write")
    add_lease_option(parser)
    parser.add_argument("words", nargs="*", help="the cluster, e.g. cluster=cpu kernel=torch_flash")
    return parser.parse_args(words)


def _cell(arguments: argparse.Namespace) -> RunConfig:
    """A cell of these ranks; of its model nothing is run."""
    ranks = (
        [] if arguments.ranks is None else [f"cluster.world_size={values.whole('--ranks', arguments.ranks)}"]
    )
    cell = resolve(composed("strategy=ulysses", *ranks, *arguments.words), this_machine())
    reason = refusal(cell)
    if reason is not None:
        raise ConfigError(reason)
    return cell


if __name__ == "__main__":
    main()
