"""Text of `data=text`: the launcher checks all files once, ranks read them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from bench.config import ConfigError
from bench.training.text_files import text_files
from bench.training.text_rows import decode, has_rows, read_rows, row_text

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
    """Yield the documents of a file: its rows, or else its text."""
    if not path.is_file():
        raise OSError(f"{path} is no file that can be read")  # reading a pipe would block
    if has_rows(path):
        for place, row in read_rows(path):
            yield row_text(row, place, tokenizer)
    else:
        yield decode(path.read_bytes(), str(path)).replace("\r\n", "\n").replace("\r", "\n")


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
