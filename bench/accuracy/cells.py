"""The list of cells that the cost model is compared with: a file of command lines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench.config import ConfigError, RunConfig
from bench.environment import REPOSITORY, Machine
from bench.request.composition import composed
from bench.request.legality import refusal
from bench.request.resolve import resolve

CELLS = REPOSITORY / "tests/bench/cost/comparison_cells.yaml"


def command_lines(file: Path) -> list[str]:
    """What each cell of a list is asked for by, beside the words of all; raises ConfigError for no list."""
    return [str(line) for line in _content(file)["cells"]]


def listed_cells(file: Path, machine: Machine) -> list[RunConfig]:
    """The cells of a list, in its order; raises ConfigError for one that is not legal here."""
    common = shlex.split(_content(file)["common"])
    cells = []
    for line in command_lines(file):
        cell = resolve(composed(*common, *shlex.split(line)), machine)
        reason = refusal(cell)
        if reason is not None:
            raise ConfigError(f"{file.name}: {line}: {reason}")
        cells.append(cell)
    return cells


def _content(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"--cells={file}: no such file; leave it out for {CELLS.relative_to(REPOSITORY)}")
    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(content, dict) or {*content} != {"common", "cells"}:
        raise ConfigError(f"--cells={file}: must hold `common` words and a list of `cells`; see {CELLS.name}")
    return content
