"""Every command of a runbook resolved and none run, for the machine it is for: no step fails for a typo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config import ConfigError
from bench.environment import REPOSITORY, Machine
from bench.experiments import experiment_of
from bench.request.choices import CONF, Raw
from bench.request.command_line import readable_by_hydra
from bench.request.composition import composed
from bench.request.hydra_errors import translated
from bench.request.legality import refusal
from bench.runbook.collected import collected
from bench.runbook.runbook import Runbook, Step
from bench.sweep.plan import plan

SUMMARY = REPOSITORY / "results" / "reference" / "cpu" / "summary.csv"
"""A sweep's table has these columns, whatever ran."""


def resolved(book: Runbook, out: Path) -> Iterator[tuple[Step, str]]:
    """Each step and what its command comes to; raises ConfigError for the first that cannot run."""
    machine = book.target.machine()
    tests = _tests_by_step(book, out)
    for step in book.steps:
        program, *words = step.words(out)
        try:
            _refuse_unknown_columns(step)
            yield step, _tests(tests[step.name]) if program == "pytest" else _script(program, words, machine)
        except ConfigError as error:
            raise ConfigError(f"step {step.name}: {error}") from error


def _tests_by_step(book: Runbook, out: Path) -> Mapping[str, int | str]:
    words = {step.name: step.words(out) for step in book.steps}
    asked = {name: rest for name, (program, *rest) in words.items() if program == "pytest"}
    return dict(zip(asked, collected([*asked.values()]), strict=True)) if asked else {}


def _refuse_unknown_columns(step: Step) -> None:
    table = pd.read_csv(SUMMARY)
    for condition in step.rows:
        try:
            table.eval(condition)
        except Exception as error:
            raise ConfigError(f"rows: {condition}: {error}") from error


def _script(program: str, words: Sequence[str], machine: Machine) -> str:
    """`python run_sweep.py ...` or `python -m module ...`."""
    if program != "python":
        raise ConfigError(f"{program} is neither python nor pytest")
    script, *rest = words
    if script == "-m":
        return _module(rest)
    if script != "run_sweep.py":
        raise ConfigError(f"python {script}: is neither run_sweep.py nor -m")
    return _sweep(rest, machine)


def _sweep(words: Sequence[str], machine: Machine) -> str:
    """How many cells there would be on that machine; raises ConfigError where one of them could not run."""
    try:
        raws = [*_composed(readable_by_hydra(words))]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(translated(error)) from error
    experiment = experiment_of(raws)
    if experiment.answer is not None:
        return f"an answer from {len(experiment.cells(raws, machine))} cells without running any"
    planned = plan(raws, machine, single="-m" not in words)
    refused = {reason for each in planned.cells if (reason := refusal(each.cell))}
    if refused:
        raise ConfigError(min(refused))
    return f"{len(planned.cells)} cells to begin with"


def _composed(words: Sequence[str]) -> Iterator[Raw]:
    """As Hydra composes the cells of a command line."""
    if words[:1] != ["-m"]:
        yield composed(*words)
        return
    given = {word.partition("=")[0] for word in words}
    words = [*words[1:], *(f"{key}={value}" for key, value in _defaults().items() if key not in given)]
    for batch in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None):
        for job in batch:
            yield composed(*job)


def _defaults() -> Mapping[str, str]:
    """What a sweep varies where the command does not say."""
    params: Any = OmegaConf.load(CONF / "config.yaml").hydra.sweeper.params
    return {str(key): str(value) for key, value in params.items()}


def _module(words: Sequence[str]) -> str:
    """The module answers to --help and knows every option."""
    module, *rest = words
    said = _said([sys.executable, "-m", module, "--help"])
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in said]
    if unknown:
        raise ConfigError(f"python -m {module}: knows no {', '.join(unknown)}")
    return "known, with its options"


def _tests(found: int | str) -> str:
    if isinstance(found, str):
        raise ConfigError(found)
    return f"{found} tests"


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{' '.join(command[1:])}: {said[-1] if said else 'no word'}")
    return done.stdout
