"""Text of `data=text`: the launcher checks all files once, ranks read them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from bench.config import ConfigError
from bench.training.text_files import JSON_LINES_SUFFIX, TABLE_SUFFIXES, text_files
from bench.training.text_rows import decode, json_array_documents, json_documents, table_documents

CHECKED_CHARACTERS = 2**16
"""Maximum number of characters that the launcher gives to the tokenizer."""


def read_documents(name: str | None, tokenizer: str | None) -> Iterator[str]:
    """Yield the documents of a file or folder, or of the default text if `name` is None.

    A document is a file of text, a row of a file with rows, or a topic of the default text. `tokenizer`
    renders rows that are chats. Raises ConfigError if a file or a row is not text.
    """
    if name is None:
        yield from topics.values()
        return
    with _read_as_text(name):
        for file in text_files(name).trained:
            yield from _documents(file, tokenizer)


@cache
def read_beginning(name: str | None, tokenizer: str | None) -> str:
    """Return the beginning of the first document that is not blank.

    All documents are read once, one after another. Raises ConfigError as `read_documents` does, or if all of
    them are blank.
    """
    beginning = ""
    for document in read_documents(name, tokenizer):
        beginning = beginning or document[:CHECKED_CHARACTERS].strip()
    if not beginning:
        raise ConfigError(f"data.path={name}: holds no text; name another file or folder")
    return beginning


def _documents(path: Path, tokenizer: str | None) -> Iterator[str]:
    """Yield the documents of a file: rows of a table or of JSON lines, or else its text.

    JSON lines have a suffix that says so, or a JSON object in the first line that is not blank.
    """
    if not path.is_file():
        raise OSError(f"{path} is no file that can be read")  # reading a pipe would block
    if path.suffix in TABLE_SUFFIXES:
        yield from table_documents(path, tokenizer)
        return
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        file.seek(0)
        if path.suffix == JSON_LINES_SUFFIX or _is_json_object(first):
            yield from json_documents(file, path, tokenizer)
        elif path.suffix == ".json":
            yield from json_array_documents(decode(file.read(), str(path)), path, tokenizer)
        else:
            yield decode(file.read(), str(path)).replace("\r\n", "\n").replace("\r", "\n")


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@contextmanager
def _read_as_text(name: str) -> Iterator[None]:
    """Turn errors in this context, which reads `data.path` as text, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, JSON lines, a Parquet or"
            " Arrow file with a column `text` or `messages`, or a folder of these"
        ) from None
