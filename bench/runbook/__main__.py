"""What to run first on a new machine: `python -m bench.runbook results/reference/one_gpu.yaml`.

Runs the steps in order and stops at the first that fails, with what that means; exits 1 then. `--dry-run`
resolves every command for the machine that the steps are for and runs none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.config import ConfigError, ExitCode
from bench.environment import REPOSITORY, this_machine
from bench.runbook.dry_run import resolved
from bench.runbook.runbook import Runbook, Step, read_runbook

PATIENCE = 3
"""A step that takes so many times its minutes is ended."""


def main(words: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.runbook", description=__doc__)
    parser.add_argument("book", type=Path, metavar="FILE", help="such as results/reference/one_gpu.yaml")
    parser.add_argument("--out", type=Path, default=Path("results/runbook"), help="folder of logs and sweeps")
    parser.add_argument("--start", metavar="STEP", help="the step to begin with")
    parser.add_argument("--dry-run", action="store_true", help="resolve every command and run none")
    given = parser.parse_args(words)
    try:
        book = read_runbook(given.book)
        if given.dry_run:
            _show(book, given.out)
            return ExitCode.OK
        _refuse_fewer_gpus(book.target.gpus, len(this_machine().gpus))
        steps = book.from_step(given.start) if given.start else book.steps
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    return _run(book, steps, given.out.resolve())


def _refuse_fewer_gpus(needed: int, found: int) -> None:
    """Raises ConfigError where too few are there: on CPU ranks steps would end well and show nothing."""
    if found < needed:
        raise ConfigError(f"the steps are for {needed} GPUs, and {found} are visible here; add --dry-run")


def _show(book: Runbook, out: Path) -> None:
    print(f"{book.purpose}\n{len(book.steps)} steps, about {book.minutes:g} minutes\n")
    for step, said in resolved(book, out):
        print(f"{_heading(step)}\n    {said}")


def _heading(step: Step) -> str:
    decides = f"\n  decides {', '.join(step.decides)}" if step.decides else ""
    return f"{step.name} (about {step.minutes:g} min)\n  {step.command}\n  expect: {step.expects}{decides}"


def _run(book: Runbook, steps: Sequence[Step], out: Path) -> ExitCode:
    """Run the steps; a failed one ends the run, or skips those that would fail with it."""
    out.mkdir(parents=True, exist_ok=True)
    left, code = [*steps], ExitCode.OK
    while left:
        step = left.pop(0)
        print(f"\n=== {_heading(step)}", flush=True)
        failure = _failure(step, out)
        if failure is None:
            continue
        code = ExitCode.FAILED
        print(f"\n{step.name}: {failure}\nthis means: {step.failure_means}")
        if step.skip_to is None:
            print(f"once it is mended: add --start={step.name}")
            return code
        print(f"going on with {step.skip_to}")
        left = book.from_step(step.skip_to)
    return code


def _failure(step: Step, out: Path) -> str | None:
    """Run a step, its output in a log beside the terminal; why it failed, None where it did not."""
    limit_s, log = step.minutes * 60 * PATIENCE, out / f"{step.name}.log"
    words = [sys.executable if word == "python" else word for word in step.words(out)]
    if words[0] == "pytest":
        words = [sys.executable, "-m", *words]
    with log.open("w") as file:
        process = subprocess.Popen(  # noqa: S603  the words of our own file
            ["/usr/bin/env", "timeout", "--kill-after=30", f"{limit_s:.0f}", *words],
            cwd=REPOSITORY, env=os.environ | step.environment(out),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    if process.wait() != 0:
        return f"exit code {process.returncode}, see {log}"
    if "pytest" in words and " passed" not in log.read_text():
        return f"every test was skipped, see {log}"
    return _unfulfilled(step, out)


def _unfulfilled(step: Step, out: Path) -> str | None:
    """The first condition that a row of the sweep's table does not fulfil; None where all do."""
    folder = step.folder(out)
    if folder is None or not step.rows:
        return None
    table = pd.read_csv(folder / "summary.csv")
    for condition in step.rows:
        fulfilled = np.asarray(table.eval(condition), dtype=bool)
        if not fulfilled.all():
            return f"{condition} does not hold for {(~fulfilled).sum()} of {len(table)} cells in {folder}"
    return None


if __name__ == "__main__":
    sys.exit(main())
