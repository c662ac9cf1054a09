"""Run the real command in a new process or, which is faster, in the process of the test."""

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

import run_sweep
from bench.common.environment import REPOSITORY
from bench.run.interrupts import SIGNALS

COMMAND = (sys.executable, str(REPOSITORY / "run_sweep.py"))
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Variables that make tests run on CPU ranks, also on a machine with GPUs."""


def run_command(folder, *words, **changed):
    """Run the command in a new process with a new fork server; None removes a variable."""
    environment = {k: v for k, v in (os.environ | NO_GPU | changed).items() if v is not None}
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run_command_here(folder, *words, out=None, main=run_sweep.main, **changed):
    """Run the command in this process, which has a warm fork server; return its output and exit code.

    `out` is a file that gets the output, `main` the function of another command.
    """
    out, errors, before = out or io.StringIO(), io.StringIO(), {s: signal.getsignal(s) for s in SIGNALS}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [COMMAND[1], *words])
        for name, value in (NO_GPU | changed).items():
            patch.setenv(name, value)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    output = out.getvalue() if isinstance(out, io.StringIO) else None
    return subprocess.CompletedProcess([*COMMAND, *words], code, output, errors.getvalue())
