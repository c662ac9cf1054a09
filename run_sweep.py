"""Ulysses or Ring Attention? `python run_sweep.py -m seq_len=8k,64k,96k` measures and reports."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from bench.common.command import again_command, outlive_readers
from bench.common.environment import this_machine
from bench.config import ConfigError, ExitCode
from bench.extras.nodes.machines import launcher_of
from bench.extras.predict import time_modes
from bench.extras.predict.prediction import modelled, timed_here
from bench.plan.estimate import Estimate
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import UNLIMITED, short_lines, whole_plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import whole_request
from bench.record.store import StoreError, warn_in_one_line
from bench.request import values
from bench.request.choices import CONF, Raw, refuse_no_conf, register_plugins_with_hydra
from bench.request.command_line import readable_by_hydra
from bench.request.composition import plain, refuse_secret_variables
from bench.request.help import help_text
from bench.request.hydra_errors import translated
from bench.run.interrupts import Interrupts
from bench.run.progress import Progress
from bench.run.resume import sweep_start
from bench.run.sweep import run_plan

HELP = {"--help": False, "-h": False, "--help-all": True}
"""Options that print the keys, and whether all of them."""
PROBE_PAYS_S = 60.0
"""Timing the CPU takes some three seconds: a plan of less than a minute does without."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def run_cells(composed: Iterable[Raw], *, single: bool = False, default_strategies: bool = False) -> NoReturn:
    """Plan these cells, say what they will take, run them, and write the report.

    Ends the process with the sweep's exit code. `bench.run.sweep.run_plan` is what runs them.
    """
    with refusals():
        raws, machine = [*composed], this_machine()
        plans_only = values.flag("plan", raws[0]["plan"])
        planned = plan(raws, machine, single=single, default_strategies=default_strategies)
        experiment = planned.experiment
        if experiment.opening is not None:
            print(experiment.opening(raws, machine))
        start = sweep_start(planned)
        estimate = estimate_of(start.pending)
        forecast = Forecast(planned, start.pending, estimate)
        if plans_only:
            width = Console().width if sys.stdout.isatty() else UNLIMITED
            print(*whole_plan(forecast, raws, start.lines, width), sep="\n")
            sys.exit(ExitCode.OK)
        planned = replace(planned, notes=(*planned.notes, *short_lines(forecast)))
        from analysis.report import write_report

        progress = Progress(Console(), estimate=estimate)
        interrupts = Interrupts.installed()
        with launcher_of(planned, raws[0], progress.say) as launcher, room_for(planned.folder):
            code = run_plan(planned, launcher, progress, write_report=write_report, interrupts=interrupts)
        sys.exit(code)


def estimate_of(cells: Sequence[PlannedCell]) -> Estimate:
    """How long steps take: by the cost model, and where that is long by a timing of this CPU."""
    by_arithmetic = Estimate(modelled)
    is_long = sum(by_arithmetic.cell_s(cell) or 0.0 for cell in cells) >= PROBE_PAYS_S
    legal = (each.cell for each in cells if each.reason is None)
    return Estimate(timed_here(legal)) if is_long else by_arithmetic


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run_one(config: DictConfig) -> None:
    """A single cell: what `python run_sweep.py` without -m runs."""
    run_cells(map(plain, [config]), single=True)


@contextmanager
def refusals() -> Iterator[None]:
    """A request that cannot be carried out is one line and exit code 2."""
    try:
        yield
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    except (HydraException, OmegaConfBaseException) as error:
        print(translated(error), file=sys.stderr)
        sys.exit(ExitCode.REQUEST_WRONG)
    except KeyboardInterrupt:
        Interrupts.installed().begin_to_close()
        print("interrupted before any cell ran; run the same command again", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"{error}; free space there, then run the same command again", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


@contextmanager
def room_for(folder: Path) -> Iterator[None]:
    """A disk that is full, of all that a sweep writes, is one line: which file, and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        again = again_command(sys.argv, folder)
        print(
            f"{error.filename or folder}: {error.strerror}; the records of cells that have ended are kept:"
            f" free space there, then: {again}",
            file=sys.stderr,
        )
        sys.exit(ExitCode.FAILED)


def main() -> None:
    """Compose, plan, run. SIGTERM and SIGHUP are interruptions, as Ctrl-C is: what is done is kept."""
    outlive_readers()
    Interrupts().install()
    time_modes.register()
    folder = f"results/sweeps/{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"
    OmegaConf.register_new_resolver("new_sweep_dir", lambda: folder, replace=True)
    refuse_secret_variables()
    warn_in_one_line()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors over instead of printing them
    with tempfile.TemporaryDirectory() as scratch, refusals():
        refuse_no_conf()
        register_plugins_with_hydra()
        sys.argv[1:] = readable_by_hydra(whole_request(sys.argv[1:]))
        if (asked := sys.argv[1:2]) and asked[0] in HELP:
            print(help_text(whole=HELP[asked[0]]))
            return
        OmegaConf.register_new_resolver("hydra_dir", lambda: scratch, replace=True)
        run_one()


if __name__ == "__main__":
    main()
