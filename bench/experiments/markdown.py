"""A table of records in Markdown: its lines, why cells are missing in it, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.labels import length_label
from bench.store import write_whole


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def reasons(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each record that says why its cell did not end well."""
    for record in records:
        if record["reason"] is not None:
            config = record["config"]
            named = f"{config['strategy']} {config['layout']} {length_label(config['seq_len'])}"
            yield f"- {named} {config['trainer']}: {record['status']}: {record['reason']}"


def write(text: str, path: Path) -> None:
    """Write the text into the sweep's folder, and print it."""
    write_whole(path, text)
    print(text)
    print(f"table: {path}")
