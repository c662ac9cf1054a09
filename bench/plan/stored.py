"""The sweep that a folder already contains: its command line, its cells and its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.config import Cell, ConfigError, Resume
from bench.record.record import Record
from bench.record.store import RECORDS, read_records
from bench.request import values
from bench.request.command_line import parse_word

CELLS = "cells"
"""Subfolder of a sweep for the folders of its cells."""
CONFIG = "config.yaml"
"""Name of the file with the plan of a sweep."""
RESUME_KEYS = frozenset({"resume", "sweep_dir"})
"""Keys that a command line must have to name a stored sweep and resume it."""
KEYS_WITHOUT_CELLS = frozenset({*RESUME_KEYS, "lease", "plan"})
"""Keys that may be given with a sweep to resume and that define no cell."""
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader, the faster one if it is built: a plan may contain thousands of cells."""


def complete_request(arguments: Sequence[str]) -> list[str]:
    """Return the command line; if it only names a stored sweep to resume, put the words of that sweep first.

    Raises:
        ConfigError: The folder of the sweep contains none.
        OverrideParseException: Hydra cannot parse a word.
    """
    words = [word for word in arguments if not word.startswith("-")]
    typed = {word.partition("=")[0]: word for word in words}
    if not typed.keys() >= RESUME_KEYS or typed.keys() - KEYS_WITHOUT_CELLS:
        return [*arguments]
    resumed = {key: parse_word(typed[key]).value() for key in RESUME_KEYS}
    if values.resume("resume", resumed["resume"]) is Resume.NEVER:
        return [*arguments]
    stored, _ = read_plan(Path(str(resumed["sweep_dir"])))
    words = [word.removeprefix("++") for word in stored]
    return [*(word for word in words if word.partition("=")[0] not in KEYS_WITHOUT_CELLS), *arguments]


def read_plan(folder: Path) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the command line of a stored sweep, without the program, and its cells as `Cell.flat`.

    Raises ConfigError if the folder contains no plan.
    """
    path = folder / CONFIG
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), SAFE_LOADER)  # noqa: S506  both loaders are safe
        argv, cells = content["argv"], content["cells"]
        if not (
            all(isinstance(word, str) for word in argv) and all(isinstance(cell, dict) for cell in cells)
        ):
            raise TypeError("argv and cells are not lists of words and of cells")  # noqa: TRY301
    except FileNotFoundError:
        raise ConfigError(
            f"resume=true: sweep_dir={folder} contains no sweep or does not exist; name the folder of a sweep"
        ) from None
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path}: is not the plan of a sweep ({reason}); repeat the words of the sweep"
        ) from None
    return argv[1:], cells


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """Cells and records of the sweep that a folder already contains; empty for a new folder."""

    cells: Sequence[Cell] = ()
    records: Sequence[Record] = ()
    size_bytes: int = 0
    """Size of the records file when it was read."""


def stored_sweep(folder: Path, resume: Resume) -> StoredSweep:
    """Return the sweep that a folder contains if a plan resumes it, and otherwise an empty sweep.

    Raises ConfigError if the plan resumes and the folder contains no sweep, and if the plan does not resume
    and the folder contains records.
    """
    path = folder / RECORDS
    size_bytes = path.stat().st_size if path.exists() else 0
    records = read_records(path) if path.exists() else []
    if resume is not Resume.NEVER:
        return StoredSweep(_stored_cells(folder, records), records, size_bytes)
    if records:
        raise ConfigError(
            f"sweep_dir={folder}: contains records already; add resume=true to run only what is missing, or"
            " name another folder"
        )
    return StoredSweep(size_bytes=size_bytes)


def _stored_cells(folder: Path, records: Sequence[Record]) -> list[Cell]:
    """Return the cells of a folder's sweep from its plan, or from its records if the plan is missing.

    Cells that cannot be read are left out. Raises ConfigError if no cell can be read.
    """
    if records and not (folder / CONFIG).exists():
        cells: Sequence[Mapping[str, Any]] = [record.config for record in records]
    else:
        _, cells = read_plan(folder)
    readable, reason = list[Cell](), ""
    for cell in cells:
        try:
            readable.append(Cell.from_flat(cell))
        except (ConfigError, KeyError, AttributeError) as error:  # written by another version
            reason = str(error)
    if cells and not readable:
        raise ConfigError(
            f"sweep_dir={folder}: its cells cannot be read, perhaps because another version wrote them"
            f" ({reason}); name another folder"
        )
    return readable
