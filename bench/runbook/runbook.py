"""What to run on a new machine, step by step: read from a YAML file in `results/reference/`."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from bench.config import ConfigError
from bench.environment import Machine

OUT = "{out}"
"""In a command: the folder that the run writes to."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine that the steps are for."""

    gpu: str
    gpus: int
    cores: int
    memory_gib: int

    def machine(self) -> Machine:
        return Machine(
            gpus=(self.gpu,) * self.gpus, cores=self.cores, cpu="any", memory_bytes=self.memory_gib * 2**30
        )


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command, and what to think of its outcome."""

    name: str
    minutes: float
    """About what it takes; after three times as long it is ended."""
    command: str
    expects: str
    failure_means: str
    env: dict[str, str] = {}
    rows: list[str] = []
    """Conditions that every row of the sweep's summary.csv fulfils, in the words of `pandas.eval`."""
    decides: list[str] = []
    """Published claims, by their ids."""
    skip_to: str | None = None
    """The step to go on with where this one fails; None where the run stops."""

    def words(self, out: Path) -> list[str]:
        """The command's words, with the folder filled in."""
        return [word.replace(OUT, str(out)) for word in shlex.split(self.command)]

    def environment(self, out: Path) -> dict[str, str]:
        """The variables it adds, with the folder filled in."""
        return {name: value.replace(OUT, str(out)) for name, value in self.env.items()}

    def folder(self, out: Path) -> Path | None:
        """Where its sweep goes; None for other commands."""
        folders = [word.partition("=")[2] for word in self.words(out) if word.startswith("sweep_dir=")]
        return Path(folders[0]) if folders else None


class Runbook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps in order."""

    purpose: str
    target: Target
    steps: list[Step]

    @property
    def minutes(self) -> float:
        return sum(step.minutes for step in self.steps)

    def from_step(self, name: str) -> list[Step]:
        """That step and all behind it; raises ConfigError where there is none of that name."""
        names = [step.name for step in self.steps]
        if name not in names:
            raise ConfigError(f"--start={name}: no such step; choose one of {', '.join(names)}")
        return self.steps[names.index(name) :]


def read_runbook(path: Path) -> Runbook:
    """The file's steps; raises ConfigError for a file that is none."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
        book = msgspec.convert(content, Runbook)
    except (OSError, YAMLError, OmegaConfBaseException, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: is no runbook: {' '.join(str(error).split())}") from error
    for step in book.steps:
        if step.skip_to is not None:
            book.from_step(step.skip_to)
    return book
