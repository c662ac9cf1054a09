"""The text of `data=text`: checked before a cell starts, read by its ranks. No torch."""

from __future__ import annotations

import codecs
import json
import pydoc_data.topics
from pathlib import Path

from bench.config import ConfigError, DataConfig

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
CHECKED_BYTES = 2**16


def read_text(data: DataConfig) -> str:
    """The text of a file, of all text files under a folder, or of the `text` fields of JSON lines."""
    if data.path is None:
        return "\n\n".join(pydoc_data.topics.topics.values())
    path = Path(data.path)
    files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    try:
        text = "\n\n".join(map(_file_text, files))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(data.path, error) from None
    if not text.strip():
        raise _empty(data.path)
    return text


def refuse_no_text(name: str) -> None:
    """Raises ConfigError for a file or folder that does not begin as text; only its beginning is read."""
    path = Path(name)
    if path.is_dir():
        if not any(found.suffix in TEXT_SUFFIXES for found in path.rglob("*")):
            raise _empty(name)
        return
    try:
        with path.open("rb") as file:
            start = file.read(CHECKED_BYTES)
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < CHECKED_BYTES)
        if path.suffix == ".jsonl" and len(start) < CHECKED_BYTES:
            text = _json_lines_text(text)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(name, error) from None
    if not text.strip():
        raise _empty(name)


def _file_text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text if path.suffix != ".jsonl" else _json_lines_text(text)


def _json_lines_text(text: str) -> str:
    return "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())


def _unreadable(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, a folder of"
        f" {' '.join(TEXT_SUFFIXES)} files, or JSON lines with a `text` field"
    )


def _empty(name: str) -> ConfigError:
    return ConfigError(f"data.path={name}: holds no text; name another file or folder")
