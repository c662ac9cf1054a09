"""Text of `data=text` and its tokens: the launcher checks all files, ranks read them. Imports no torch."""

from __future__ import annotations

import json
import pydoc_data.topics
import re
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
JSON_LINES_SUFFIX = ".jsonl"
TABLE_SUFFIXES = (".parquet", ".arrow")
CHECKED_CHARACTERS = 2**16
"""Maximum number of characters that the launcher gives to the tokenizer."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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


@cache
def read_beginning(name: str | None) -> str:
    """Return the beginning of the first text in a file or folder; of the default text if `name` is None.

    All files are read once, one line of JSON lines after another. Raises ConfigError if one is not text.
    """
    if name is None:
        return next(iter(pydoc_data.topics.topics.values()))
    beginning = ""
    with _read_as_text(name):
        for file in _text_files(name):
            for document in _documents(file):
                beginning = beginning or document[:CHECKED_CHARACTERS].strip()
    if not beginning:
        raise _no_text_error(name)
    return beginning


def _text_files(name: str) -> list[Path]:
    """Return a file, or the texts under a folder; raise ValueError if it mixes texts and JSON lines."""
    path = Path(name)
    tables = [file for file in (path, *path.rglob("*")) if file.suffix in TABLE_SUFFIXES]
    if tables:
        raise ValueError(f"{tables[0]} is a table; write it as JSON lines with datasets' Dataset.to_json")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in (*TEXT_SUFFIXES, JSON_LINES_SUFFIX))
    lines = [file for file in files if file.suffix == JSON_LINES_SUFFIX]
    if lines and len(lines) != len(files):
        other = next(file for file in files if file not in lines)
        raise ValueError(
            f"it has {lines[0].name} and {other.name}, JSON lines and other text; name one of them"
        )
    return files


def _documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file: `text` fields if its first line that is not blank is a JSON object."""
    if not path.is_file():
        raise OSError(f"{path} is no file that can be read")  # reading a pipe would block
    with path.open(encoding="utf-8", newline="\n") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if path.suffix != JSON_LINES_SUFFIX and not _is_json_object(first):
            yield file.read().replace("\r\n", "\n").replace("\r", "\n")
            return
        for number, line in enumerate(file, start=1):  # lines end at \n alone: strings may hold U+2028
            if line.strip():
                yield _text_field(line, f"{path}:{number}")


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _text_field(line: str, place: str) -> str:
    """Return the text of a JSON line; raise ValueError that names its place if it has none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if not isinstance(row, dict) or "text" not in row:
        keys = ", ".join(row) if isinstance(row, dict) else "none"
        chat = ", a chat that a tokenizer's apply_chat_template turns into text" if "messages" in keys else ""
        raise ValueError(f"{place}: has no key `text`; its keys: {value_label(keys)}{chat}")
    text = row["text"]
    if not isinstance(text, str):
        raise ValueError(f"{place}: its `text` is not a string")  # noqa: TRY004  a fault of the file
    if LONE_SURROGATE.search(text):
        raise ValueError(f"{place}: its `text` has half of a surrogate pair, which UTF-8 cannot hold")
    return text


@contextmanager
def _read_as_text(name: str) -> Iterator[None]:
    """Turn errors in this context, which reads `data.path` as text, into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data.path={name}: cannot be read as text ({error}); name a UTF-8 file, a folder of"
            f" {' '.join(TEXT_SUFFIXES)} files or of .jsonl files, or JSON lines with a `text` field"
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
