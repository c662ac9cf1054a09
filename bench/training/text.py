"""Text of `data=text` and its tokens: the launcher checks the beginning, ranks read all. Imports no torch."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common.labels import value_label
from bench.config import ConfigError, DataConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
CHECKED_CHARACTERS = 2**16
"""Maximum number of characters of a file that the launcher reads."""


def read_text(data: DataConfig) -> str:
    """Return the text of a file, of all text files under a folder, or of the `text` fields of JSON lines."""
    return "\n\n".join(read_documents(data))


def read_documents(data: DataConfig) -> list[str]:
    """Return the documents of a text; raise ConfigError if it cannot be read or is empty.

    A document is a file of a folder, a line of JSON lines, or a topic of the default text.
    """
    if data.path is None:
        return [*pydoc_data.topics.topics.values()]
    with _read_as_text(data.path):
        documents = [document for file in _text_files(data.path) for document in _documents(file)]
    if not any(document.strip() for document in documents):
        raise _no_text_error(data.path)
    return documents


def read_beginning(name: str | None) -> str:
    """Return the beginning of the first text in a file or folder; of the default text if `name` is None.

    At most CHECKED_CHARACTERS of a file are read. Raises ConfigError if they are not text, or if any file
    of a folder cannot be read.
    """
    if name is None:
        return next(iter(pydoc_data.topics.topics.values()))
    with _read_as_text(name):
        files = _text_files(name)
        for file in files:
            if not file.is_file() or not os.access(file, os.R_OK):
                raise OSError(f"{file} is no file that can be read")
        starts = ("".join(_documents(file, CHECKED_CHARACTERS)) for file in files)
        text = next(filter(str.strip, starts), None)
    if text is None:
        raise _no_text_error(name)
    return text


def _text_files(name: str) -> list[Path]:
    path = Path(name)
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)


def _documents(path: Path, max_characters: int = -1) -> list[str]:
    """Return the documents in the first `max_characters` of a file, by default in the whole file.

    A JSON line that is cut at `max_characters` is left out. If it is the only line, its raw text is returned.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(max_characters)
    if path.suffix != ".jsonl":
        return [text]
    return _json_lines(text if len(text) != max_characters else text.rpartition("\n")[0]) or [text]


def _json_lines(text: str) -> list[str]:
    texts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a `text` field is not a string")
    return texts


@contextmanager
def _read_as_text(name: str) -> Iterator[None]:
    """Turn errors in this context, which reads `data.path` as text, into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, a folder of"
            f" {' '.join(TEXT_SUFFIXES)} files, or JSON lines with a `text` field"
        ) from None


def _no_text_error(name: str) -> ConfigError:
    return ConfigError(f"data.path={name}: holds no text; name another file or folder")


def token_ids(text: str, tokenizer: str, vocab_size: int) -> NDArray[Any]:
    """Return the token IDs of a text, an int32 vector.

    Raises ConfigError if the tokenizer fails, or if an ID is not below `vocab_size`.
    """
    try:
        ids = np.array(_encoder(tokenizer)(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # noqa: BLE001  the tokenizers package raises plain Exception
        raise ConfigError(
            f"data.tokenizer={tokenizer}: cannot be used ({_first_line(error)}); name a folder with a"
            " tokenizer.json, such as a model's own"
        ) from None
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"data.tokenizer={tokenizer}: gives ids up to {int(ids.max())}, but the model's vocabulary has"
            f" {vocab_size}; take the model's own tokenizer"
        )
    return ids


@cache
def check_tokenizer(tokenizer: str, beginning: str, vocab_size: int) -> None:
    """Raise ConfigError if `token_ids` does so for the beginning of a text."""
    token_ids(beginning, tokenizer, vocab_size)


@cache
def _encoder(tokenizer: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return value_label(lines[0].rstrip(":")) if lines else type(error).__name__
