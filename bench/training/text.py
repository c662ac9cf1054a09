"""The text of `data=text`: checked before a cell starts, read by its ranks. No torch."""

from __future__ import annotations

import codecs
import json
import os
import pydoc_data.topics
from pathlib import Path

from bench.config import ConfigError, DataConfig

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
CHECKED_BYTES = 2**16


def read_text(data: DataConfig) -> str:
    """The text of a file, of all text files under a folder, or of the `text` fields of JSON lines."""
    return "\n\n".join(read_documents(data))


def read_documents(data: DataConfig) -> list[str]:
    """The same text by document: a file of a folder, a line of JSON lines, a topic of the default text."""
    if data.path is None:
        return [*pydoc_data.topics.topics.values()]
    path = Path(data.path)
    files = _text_files(path) if path.is_dir() else [path]
    try:
        documents = [document for file in files for document in _file_documents(file)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(data.path, error) from None
    if not any(document.strip() for document in documents):
        raise _empty(data.path)
    return documents


def beginning(name: str | None) -> str:
    """The first text of a file or folder, CHECKED_BYTES at most, which is all that is read of it.

    Raises ConfigError for one that does not begin as text, and for a folder with a file that cannot be read.
    """
    if name is None:
        return next(iter(pydoc_data.topics.topics.values()))
    path = Path(name)
    files = _text_files(path) if path.is_dir() else [path]
    if not files:
        raise _empty(name)
    for file in files:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise _unreadable(name, OSError(f"{file} is no file that can be read"))
    texts = (_beginning_of(name, file) for file in files)
    found = next((text for text in texts if text.strip()), None)
    if found is None:
        raise _empty(name)
    return found


def _beginning_of(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(CHECKED_BYTES)
        is_all = len(start) < CHECKED_BYTES
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=is_all)
        if path.suffix == ".jsonl":
            return "".join(_json_lines(text if is_all else text.rpartition("\n")[0])) or text
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(name, error) from None
    return text


def _text_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES)


def _file_documents(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [text] if path.suffix != ".jsonl" else _json_lines(text)


def _json_lines(text: str) -> list[str]:
    texts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a `text` field is no text")
    return texts


def _unreadable(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, a folder of"
        f" {' '.join(TEXT_SUFFIXES)} files, or JSON lines with a `text` field"
    )


def _empty(name: str) -> ConfigError:
    return ConfigError(f"data.path={name}: holds no text; name another file or folder")
