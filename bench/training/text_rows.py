"""Documents of the rows of JSON lines, Parquet and Arrow files: a text, or a chat. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench.common.labels import value_label
from bench.config import ConfigError
from bench.training.text_files import ROW_SUFFIXES, TABLE_SUFFIXES
from bench.training.tokenizer import render_chat

TEXT_KEY = "text"
CHAT_KEYS = ("messages", "conversations")
LONGBENCH_KEYS = ("context", "input", "answers")
"""Keys of a row in LongBench's format."""
TASK_KEYS = ("dataset", "task")
"""Keys of such a row that name its task."""
MESSAGE_KEYS = ("reasoning_content", "reasoning", "thinking", "content", "tool_calls")
"""Keys of a message with its text, in order; a message without `content` has another one."""
BATCH_ROWS = 256
"""Number of rows of a Parquet file that are read at a time."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of each row of a file: JSON lines, a JSON array, Parquet or Arrow.

    Rows are counted from 0, as `datasets` and pandas do, lines from 1. Raises ValueError that names the place
    of a row that is not JSON.
    """
    if path.suffix in TABLE_SUFFIXES:
        for number, row in enumerate(_table_rows(path)):
            yield f"{path} row {number}", row
    elif path.suffix == ".json" and not _begins_with_object(path):
        rows = _json_row(decode(path.read_bytes(), str(path)), str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path}: is neither an array of rows nor JSON lines")
        for number, row in enumerate(rows):
            yield f"{path} row {number}", row
    else:
        with path.open("rb") as file:
            yield from _json_lines(file, path)


def has_rows(path: Path) -> bool:
    """Return whether a file has rows: its suffix or a JSON object in its first line says so."""
    return path.suffix in (*ROW_SUFFIXES, ".json") or _begins_with_object(path)


def _begins_with_object(path: Path) -> bool:
    """Return whether the first line that is not blank is a JSON object."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _json_lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of each line that is not blank."""
    for number, line in enumerate(file, start=1):  # lines end at \n alone: strings may hold U+2028
        place = f"{path}:{number}"
        text = decode(line, place, file.tell() - len(line))
        if text.strip():
            yield place, _json_row(text, place)


def decode(content: bytes, place: str, offset: int = 0) -> str:
    """Return UTF-8 as text; raise ValueError that names the place and the first bad byte of the file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: byte {offset + error.start} is not UTF-8: {error.reason}") from None


def _json_row(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns of a text, a chat or a question; with all columns without these."""
    number = 0
    try:
        for batch in _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path):
            names = _columns(batch.schema.names)
            for values in zip(*(batch[name] for name in names), strict=True):
                yield {name: value.as_py() for name, value in zip(names, values, strict=True)}
                number += 1
    except ImportError:
        raise ConfigError(
            f"data.path: {path} needs the package pyarrow; install it with: pip install pyarrow"
        ) from None
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's, which name no file
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} row {number}: {reason}") from None


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        columns = _columns(file.schema_arrow.names)
        yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of a stream, which `datasets` writes, or of an Arrow file."""
    from pyarrow import ipc

    try:
        stream = ipc.open_stream(path)
    except ValueError:
        file = ipc.open_file(path)
        stream = map(file.get_batch, range(file.num_record_batches))
    yield from stream


def _columns(names: list[str]) -> list[str]:
    if set(LONGBENCH_KEYS) <= {*names}:
        return [name for name in names if name in (*LONGBENCH_KEYS, *TASK_KEYS)]
    return [name for name in names if name in (TEXT_KEY, *CHAT_KEYS)] or names


def row_text(row: Any, place: str, tokenizer: str | None) -> str:
    """Return the text or the rendered chat of a row; raise ValueError that names its place if it has none."""
    keys = [*row] if isinstance(row, dict) else []
    known = [key for key in (TEXT_KEY, *CHAT_KEYS) if key in keys]
    key = next((key for key in known if row[key] is not None), known[0] if known else None)
    if key is None and set(LONGBENCH_KEYS) <= {*keys}:
        return f"{row['context']}\n\n{row['input']}"
    if key is None:
        names = value_label(", ".join(keys) or "none")
        raise ValueError(f"{place}: has no key `text`, `messages` or `conversations`; its keys: {names}")
    text = row[key] if key == TEXT_KEY else _chat_text(row[key], f"{place}: its `{key}`", tokenizer)
    if not isinstance(text, str):
        raise ValueError(f"{place}: its `text` is not a string")  # noqa: TRY004  a fault of the file
    if LONE_SURROGATE.search(text):
        raise ValueError(f"{place}: its `{key}` has half of a surrogate pair, which UTF-8 cannot hold")
    return text


def _chat_text(messages: Any, place: str, tokenizer: str | None) -> str:
    """Return a chat as text: by the tokenizer's template, or without one each message after its role.

    Raises ValueError if a message has no `role` or no text.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place} is no list of messages")
    given = [_message(message, place, number) for number, message in enumerate(messages, start=1)]
    return "\n".join(map(_message_text, given)) if tokenizer is None else render_chat(given, place, tokenizer)


def _message(message: Any, place: str, number: int) -> dict[str, Any]:
    """Return the keys of a message that have a value, with its content as one string, which may be empty."""
    keys = [*message] if isinstance(message, dict) else []
    # Arrow gives every message all keys. Transformers 5.24 drops those without a value, 5.17 does not.
    given = {key: message[key] for key in keys if message[key] is not None}
    if "function_call" in given:  # the older form of a tool call, which templates do not read
        given["tool_calls"] = [{"type": "function", "function": given.pop("function_call")}]
    if given.keys() & MESSAGE_KEYS:  # templates add strings to the content
        given.setdefault("content", "")
    if isinstance(given.get("content"), list):
        given["content"] = "".join(_part_text(part, place, number) for part in given["content"])
    for key in ("role", "content"):
        if key not in given or not isinstance(given[key], str):
            names = value_label(", ".join(keys) or "none")
            raise ValueError(f"{place} has no string `{key}` in message {number}; its keys: {names}")
    return given


def _part_text(part: Any, place: str, number: int) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f"{place} has a part without `text` in message {number}: {value_label(part)}")


def _message_text(message: dict[str, Any]) -> str:
    """Return a message without a template, with its tool calls as JSON."""
    values = [message[key] for key in MESSAGE_KEYS if message.get(key)]
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    return f"{message['role']}: " + "\n".join(texts)
