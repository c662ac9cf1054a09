"""What a sweep's folder holds of its plan: the words it was asked in, and the cells that they made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from bench.config import ConfigError, MeasureConfig, Resume, RunConfig
from bench.labels import shown
from bench.request import values
from bench.request.command_line import parsed
from bench.store import read_records

CONFIG = "config.yaml"
RESUMING = frozenset({"resume", "sweep_dir"})
GOING_ON = frozenset({*RESUMING, "lease", "plan"})
"""Words that name a sweep and ask for no cell."""
PAIRS = ("env.", "strategy.")
"""Beginnings of keys that a cell may have or not; another that is missing was not known yet."""
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster one where PyYAML has it: a sweep's plan may hold thousands of cells."""
Flat = Mapping[str, Any]
"""A cell as `RunConfig.flat` gives it, of plain JSON values."""


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The request of a sweep as its folder holds it."""

    words: tuple[str, ...]
    """As they were typed, without the program."""
    cells: tuple[Flat, ...]


def whole_request(arguments: Sequence[str]) -> list[str]:
    """What was typed; where that only names a sweep to go on with, that sweep's own words come first.

    Raises ConfigError where its folder holds none, and Hydra's OverrideParseException for an unreadable word.
    """
    words = [word for word in arguments if not word.startswith("-")]
    typed = {word.partition("=")[0]: word for word in words}
    if not typed.keys() >= RESUMING or typed.keys() - GOING_ON:
        return [*arguments]
    given = {key: parsed(typed[key]).value() for key in RESUMING}
    if values.resume("resume", given["resume"]) is Resume.NEVER:
        return [*arguments]
    own = read_plan(_existing(Path(str(given["sweep_dir"]))))
    words = [word.removeprefix("++") for word in own.words]
    return [*(word for word in words if word.partition("=")[0] not in GOING_ON), *arguments]


def read_plan(folder: Path) -> StoredPlan:
    """The plan of a sweep's folder; raises ConfigError where it has none."""
    path = folder / CONFIG
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), SAFE_LOADER)  # noqa: S506  one of the two safe ones
        argv, cells = content["argv"], content["cells"]
        if not (
            all(isinstance(word, str) for word in argv) and all(isinstance(cell, dict) for cell in cells)
        ):
            raise TypeError("argv and cells are not lists of words and of cells")  # noqa: TRY301
    except FileNotFoundError:
        raise ConfigError(
            f"sweep_dir={folder}: has no {CONFIG} that says what was asked; add the words of the sweep"
        ) from None
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}: is no sweep's plan ({why}); add the words of the sweep") from None
    return StoredPlan(tuple(argv[1:]), tuple(cells))


def resumed_cells(folder: Path) -> Sequence[Flat]:
    """The cells of a folder's sweep, by its plan or else its records; raises ConfigError for no sweep."""
    _existing(folder)
    if (folder / CONFIG).exists():
        return read_plan(folder).cells
    return [record["config"] for record in read_records(folder / "records.jsonl")]


class Resumed:
    """The cells that are planned now, beside those of the sweep that they are to go on with."""

    def __init__(self, folder: Path, planned: Sequence[RunConfig], stored: Sequence[Flat]) -> None:
        self._folder = folder
        ours: list[Flat] = [json.loads(json.dumps(cell.flat())) for cell in planned]
        known = {key for cell in stored for key in cell}
        asked = dict.fromkeys(key for cell in ours for key in cell)
        pairs = [key for key in known if key.startswith(PAIRS)]
        keys = [key for key in asked if key in known or key.startswith(PAIRS)]
        free = _free(planned[0])
        self._keys = [key for key in dict.fromkeys([*keys, *pairs]) if key not in free]
        self._planned, self._stored = [*map(self._values, ours)], [*map(self._values, stored)]

    def refuse_others(self) -> None:
        """Raises ConfigError where no planned cell is one of the sweep's own: another sweep is asked for."""
        if not self._stored or not {*self._planned}.isdisjoint(self._stored):
            return
        pairs = zip(self._keys, self._stored[0], self._planned[0], strict=True)
        key, theirs, ours = next(each for each in pairs if each[1] != each[2])
        raise ConfigError(
            f"sweep_dir={self._folder}: its cells are others, with {key}={shown(json.loads(theirs))} in place"
            f" of {key}={shown(json.loads(ours))}; add no word but resume=true to go on with its own plan, or"
            " name another folder"
        )

    @property
    def is_whole(self) -> bool:
        """Whether all cells of the sweep are planned again."""
        return {*self._stored} <= {*self._planned}

    def _values(self, cell: Flat) -> tuple[str, ...]:
        return tuple(json.dumps(cell.get(key)) for key in self._keys)


def _existing(folder: Path) -> Path:
    """The folder; raises ConfigError where it is not there, or holds no sweep."""
    if not folder.exists():
        raise ConfigError(
            f"resume=true: sweep_dir={folder} does not exist; name the folder of the sweep to continue"
        )
    if not any((folder / name).exists() for name in (CONFIG, "records.jsonl")):
        raise ConfigError(
            f"resume=true: sweep_dir={folder} holds no sweep; name the folder of one, or leave it out"
        )
    return folder


def _free(cell: RunConfig) -> set[str]:
    """Keys that may differ between two cells that ask for the same work."""
    decides = {f"measure.{name}" for name in cell.identity()["measure"]}
    return {"experiment", *(f"measure.{field.name}" for field in fields(MeasureConfig))} - decides
