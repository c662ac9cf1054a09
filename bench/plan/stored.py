"""The sweep that a folder holds already: its words, its cells and its records."""

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
from bench.request.command_line import parsed

CONFIG = "config.yaml"
RESUMING = frozenset({"resume", "sweep_dir"})
GOING_ON = frozenset({*RESUMING, "lease", "plan"})
"""Words that name a sweep and ask for no cell."""
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster one where PyYAML has it: a sweep's plan may hold thousands of cells."""


def whole_request(arguments: Sequence[str]) -> list[str]:
    """Return the request's words, after those of the sweep where they only name one to go on with.

    Raises ConfigError where its folder holds none, and Hydra's OverrideParseException for an unreadable word.
    """
    words = [word for word in arguments if not word.startswith("-")]
    typed = {word.partition("=")[0]: word for word in words}
    if not typed.keys() >= RESUMING or typed.keys() - GOING_ON:
        return [*arguments]
    given = {key: parsed(typed[key]).value() for key in RESUMING}
    if values.resume("resume", given["resume"]) is Resume.NEVER:
        return [*arguments]
    own, _ = read_plan(Path(str(given["sweep_dir"])))
    words = [word.removeprefix("++") for word in own]
    return [*(word for word in words if word.partition("=")[0] not in GOING_ON), *arguments]


def read_plan(folder: Path) -> tuple[list[str], list[Mapping[str, Any]]]:
    """A sweep's words as they were typed, without the program, and its cells as `Cell.flat` gives them.

    Raises ConfigError where the folder holds no plan.
    """
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
            f"resume=true: sweep_dir={folder} holds no sweep, or does not exist; name the folder of one"
        ) from None
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}: is no sweep's plan ({why}); add the words of the sweep") from None
    return argv[1:], cells


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """The sweep that a folder holds already; empty in a new folder."""

    cells: Sequence[Cell] = ()
    records: Sequence[Record] = ()
    size_bytes: int = 0
    """Size of the file of records when it was read."""


def stored_sweep(folder: Path, resume: Resume) -> StoredSweep:
    """Read the sweep that a plan goes on with.

    Raises ConfigError for a folder with records without `resume`, and for one without a sweep with it.
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
    """Return the cells of a folder's sweep, by its plan or else its records."""
    if records and not (folder / CONFIG).exists():
        cells: Sequence[Mapping[str, Any]] = [record.config for record in records]
    else:
        _, cells = read_plan(folder)
    found, why = list[Cell](), ""
    for cell in cells:
        try:
            found.append(Cell.from_flat(cell))
        except (ConfigError, KeyError, AttributeError) as error:  # of another version
            why = str(error)
    if cells and not found:
        raise ConfigError(
            f"sweep_dir={folder}: its cells cannot be read, perhaps as another version wrote them ({why});"
            " name another folder"
        )
    return found
