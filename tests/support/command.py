"""The real command, as a person types it: in a process of its own, or sooner in the test's own."""

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
"""What tests know of a sweep they know of CPU ranks, also where there is a GPU."""


def typed(folder, *words, **changed):
    """The command in a process of its own, and so with a fork server of its own; None removes a variable."""
    environment = {k: v for k, v in (os.environ | NO_GPU | changed).items() if v is not None}
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def typed_here(folder, *words, out=None, main=run_sweep.main, **changed):
    """The same in this process, where the fork server of the tests is warm: what it said and its exit code.

    `out` is a file to write to in place of a pipe, `main` what another command runs.
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
        except SystemExit as ended:
            code = ended.code
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)
    said = out.getvalue() if isinstance(out, io.StringIO) else None
    return subprocess.CompletedProcess([*COMMAND, *words], code, said, errors.getvalue())
