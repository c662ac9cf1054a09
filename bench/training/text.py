"""The text of `data=text` and its tokens: tried before a cell starts, read whole by its ranks. No torch."""

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

from bench.common.labels import shown
from bench.config import ConfigError, DataConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
CHECKED_CHARACTERS = 2**16


def read_text(data: DataConfig) -> str:
    """The text of a file, of all text files under a folder, or of the `text` fields of JSON lines."""
    return "\n\n".join(read_documents(data))


def read_documents(data: DataConfig) -> list[str]:
    """The same text by document: a file of a folder, a line of JSON lines, a topic of the default text."""
    if data.path is None:
        return [*pydoc_data.topics.topics.values()]
    with _read_as_text(data.path):
        documents = [each for file in _text_files(data.path) for each in _documents(file)]
    if not any(document.strip() for document in documents):
        raise _empty(data.path)
    return documents


def beginning(name: str | None) -> str:
    """The first text of a file or folder, of which CHECKED_CHARACTERS at most are read.

    Raises ConfigError for one that does not begin as text, and for a folder with a file that cannot be read.
    """
    if name is None:
        return next(iter(pydoc_data.topics.topics.values()))
    with _read_as_text(name):
        files = _text_files(name)
        for file in files:
            if not file.is_file() or not os.access(file, os.R_OK):
                raise OSError(f"{file} is no file that can be read")
        starts = ("".join(_documents(file, CHECKED_CHARACTERS)) for file in files)
        found = next(filter(str.strip, starts), None)
    if found is None:
        raise _empty(name)
    return found


def _text_files(name: str) -> list[Path]:
    path = Path(name)
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.rglob("*") if each.suffix in TEXT_SUFFIXES)


def _documents(path: Path, characters: int = -1) -> list[str]:
    """Those of a file, or of so many of its characters: JSON lines that are whole, else what there is."""
    with path.open(encoding="utf-8") as file:
        text = file.read(characters)
    if path.suffix != ".jsonl":
        return [text]
    return _json_lines(text if len(text) != characters else text.rpartition("\n")[0]) or [text]


def _json_lines(text: str) -> list[str]:
    texts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a `text` field is no text")
    return texts


@contextmanager
def _read_as_text(name: str) -> Iterator[None]:
    """What cannot be read, or is no text, becomes a ConfigError that names it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, a folder of"
            f" {' '.join(TEXT_SUFFIXES)} files, or JSON lines with a `text` field"
        ) from None


def _empty(name: str) -> ConfigError:
    return ConfigError(f"data.path={name}: holds no text; name another file or folder")


def token_ids(text: str, tokenizer: str, vocab_size: int) -> NDArray[Any]:
    """The ids of a text, [T] int32; raises ConfigError for a tokenizer that fails or exceeds a vocabulary."""
    try:
        ids = np.array(_encoder(tokenizer)(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    except Exception as error:  # noqa: BLE001  the library below raises Exception itself
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
def refuse_tokenizer(tokenizer: str, beginning: str, vocab_size: int) -> None:
    """Raises ConfigError for a tokenizer that no rank could use on a text that begins so."""
    token_ids(beginning, tokenizer, vocab_size)


@cache
def _encoder(tokenizer: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shown(lines[0].rstrip(":")) if lines else type(error).__name__
