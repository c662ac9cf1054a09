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
    return "\n\n".join(read_documents(data))


def read_documents(data: DataConfig) -> list[str]:
    """The same text by document: a file of a folder, a line of JSON lines, a topic of the default text."""
    if data.path is None:
        return [*pydoc_data.topics.topics.values()]
    path = Path(data.path)
    files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    try:
        documents = [document for file in files for document in _file_documents(file)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(data.path, error) from None
    if not any(document.strip() for document in documents):
        raise _empty(data.path)
    return documents


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
            text = "".join(_json_lines(text))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(name, error) from None
    if not text.strip():
        raise _empty(name)


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
