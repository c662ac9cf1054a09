"""Files under `data.path` that are trained on, and those that are left out. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.config import ConfigError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSON_LINES_SUFFIX = ".jsonl"
TABLE_SUFFIXES = (".parquet", ".arrow")
ROW_SUFFIXES = (JSON_LINES_SUFFIX, *TABLE_SUFFIXES)
MAX_NAMED = 3
"""Largest number of left-out files that the plan names."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files that are trained on, in this order, and the other files of their folder."""

    trained: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()


def text_files(name: str) -> TextFiles:
    """Return a file, or the files under a folder: those with rows or, if there are none, the texts.

    Raises ConfigError if the folder has rows in several formats, or the splits of a `datasets.DatasetDict`.
    """
    path = Path(name)
    if not path.is_dir():
        return TextFiles((path,))
    if (splits := path / "dataset_dict.json").is_file():
        names = " or ".join(str(path / split) for split in json.loads(splits.read_bytes())["splits"])
        raise ConfigError(f"data.path={name}: has several splits; name one split: {names}")
    listed = sorted(file for file in path.rglob("*") if not file.is_dir())
    trained = _saved_files(path) or _files_of_one_kind(name, listed)
    return TextFiles(tuple(trained), tuple(sorted({*listed} - {*trained})))


def files_line(name: str) -> str | None:
    """Return a line for the plan on the files of a folder; None if `name` is a file."""
    if not Path(name).is_dir():
        return None
    files = text_files(name)
    count, left_out = len(files.trained), [str(file.relative_to(name)) for file in files.left_out]
    suffixes = " ".join(sorted({f"*{file.suffix}" for file in files.trained}))
    line = f"data.path={name}: {count} of {count + len(left_out)} files are trained on ({suffixes})"
    if not left_out:
        return line
    more = f" and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
    return f"{line}; left out: {', '.join(left_out[:MAX_NAMED])}{more}"


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a dataset that `datasets` saved; an empty list if the folder is none.

    Such a folder may also have `cache-*.arrow`, which `Dataset.map` and `Dataset.filter` write.
    """
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return []
    return [folder / file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]


def _files_of_one_kind(name: str, listed: list[Path]) -> list[Path]:
    kinds = sorted({file.suffix for file in listed if file.suffix in ROW_SUFFIXES})
    if len(kinds) > 1:
        mixed = " and ".join(f"*{kind}" for kind in kinds)
        raise ConfigError(f"data.path={name}: mixes {mixed} files; name one file, or a folder of one kind")
    return [file for file in listed if file.suffix in (kinds or TEXT_SUFFIXES)]
