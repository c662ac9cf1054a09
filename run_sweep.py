"""The command: `python run_sweep.py -m seq_len=8k,64k,96k` compares Ulysses and Ring Attention."""

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

from bench.common.command import outlive_readers, resume_command
from bench.common.environment import this_machine
from bench.config import ConfigError, ExitCode
from bench.extras.nodes.machines import launcher_of
from bench.extras.predict import time_modes
from bench.extras.predict.prediction import expected_after_probe, expected_by_cost_model
from bench.plan.estimate import Estimate
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import UNLIMITED, short_lines, whole_plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import complete_request
from bench.record.store import StoreError, warn_in_one_line
from bench.request import values
from bench.request.choices import CONF, Raw, refuse_no_conf, register_plugins_with_hydra
from bench.request.command_line import hydra_arguments, parent_command, refuse_several_processes
from bench.request.composition import plain, refuse_secret_variables
from bench.request.help import help_text
from bench.request.hydra_errors import translate_error
from bench.run.interrupts import Interrupts
from bench.run.progress import Progress
from bench.run.resume import sweep_start
from bench.run.sweep import run_plan

HELP = {"--help": False, "-h": False, "--help-all": True}
"""Options that print the help, each with whether it lists all keys."""
PROBE_WORTHWHILE_S = 60.0
"""Estimated seconds of a sweep from which on its estimate is improved by timing this CPU, for about 3 s."""
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Numbers of the errors of a disk that is full, over its quota or read-only."""


def run_cells(composed: Iterable[Raw], *, single: bool = False, default_strategies: bool = False) -> NoReturn:
    """Plan the requested cells, print their expected duration, run them, write the report and exit.

    With `plan=true` print the plan and exit without running a cell. The exit code is that of the sweep.

    Args:
        composed: One composed configuration per cell.
        single: Refuse an illegal cell, which a sweep records as `unsupported`.
        default_strategies: The user named no strategy. If no ranks share a sequence here, the strategies that
            share sequences are left out.
    """
    with errors_in_one_line():
        requests, machine = [*composed], this_machine()
        plans_only = values.flag("plan", requests[0]["plan"])
        planned = plan(requests, machine, single=single, default_strategies=default_strategies)
        experiment = planned.experiment
        if experiment.opening_line is not None:
            print(experiment.opening_line(requests, machine))
        start = sweep_start(planned)
        estimate = estimate_of(start.pending)
        forecast = Forecast(planned, start.pending, estimate)
        if plans_only:
            width = Console().width if sys.stdout.isatty() else UNLIMITED
            print(*whole_plan(forecast, requests, start.lines, width), sep="\n")
            sys.exit(ExitCode.OK)
        planned = replace(planned, notes=(*planned.notes, *short_lines(forecast)))
        from analysis.report import write_report

        progress = Progress(Console(), estimate=estimate)
        interrupts = Interrupts.current()
        with (
            launcher_of(planned, requests[0], progress.print_line) as launcher,
            full_disk_in_one_line(planned.folder),
        ):
            code = run_plan(planned, launcher, progress, write_report=write_report, interrupts=interrupts)
        sys.exit(code)


def estimate_of(cells: Sequence[PlannedCell]) -> Estimate:
    """Return an estimate of step times by the cost model.

    If the cells take PROBE_WORTHWHILE_S or more by it, the estimate is based on a timing of this CPU as well.
    """
    by_cost_model = Estimate(expected_by_cost_model)
    is_long = sum(by_cost_model.cell_s(cell) or 0.0 for cell in cells) >= PROBE_WORTHWHILE_S
    legal = (planned.cell for planned in cells if planned.reason is None)
    return Estimate(expected_after_probe(legal)) if is_long else by_cost_model


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def run_one(config: DictConfig) -> None:
    """Run a single cell, as `python run_sweep.py` does without -m."""
    run_cells(map(plain, [config]), single=True)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn an expected error into one line on stderr and an exit code, 2 for an error in the request.

    Expected are also an interrupt before any cell ran, and a full disk.
    """
    try:
        yield
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.INVALID_REQUEST)
    except (HydraException, OmegaConfBaseException) as error:
        print(translate_error(error), file=sys.stderr)
        sys.exit(ExitCode.INVALID_REQUEST)
    except KeyboardInterrupt:
        Interrupts.current().ignore_signals()
        print("interrupted before any cell ran; run the same command again", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        print(f"{error}; free space there, then run the same command again", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


@contextmanager
def full_disk_in_one_line(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into one line with the command that resumes the sweep, and exit."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        again = resume_command(sys.argv, folder)
        print(
            f"{error.filename or folder}: {error.strerror}; records of finished cells are kept; free space"
            f" there, then run: {again}",
            file=sys.stderr,
        )
        sys.exit(ExitCode.FAILED)


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP interrupt like Ctrl-C, which keeps finished records."""
    outlive_readers()
    Interrupts().install()
    time_modes.register()
    folder = f"results/sweeps/{datetime.now().astimezone():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"
    OmegaConf.register_new_resolver("new_sweep_dir", lambda: folder, replace=True)
    refuse_secret_variables()
    warn_in_one_line()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    with tempfile.TemporaryDirectory() as scratch, errors_in_one_line():
        refuse_several_processes(os.environ, parent_command())
        refuse_no_conf()
        register_plugins_with_hydra()
        sys.argv[1:] = hydra_arguments(complete_request(sys.argv[1:]))
        if (option := sys.argv[1:2]) and option[0] in HELP:
            print(help_text(whole=HELP[option[0]]))
            return
        OmegaConf.register_new_resolver("hydra_dir", lambda: scratch, replace=True)
        run_one()


if __name__ == "__main__":
    main()
