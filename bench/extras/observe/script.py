"""The observed script: its name, its arguments, and the messages printed to it. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from bench.common.environment import git
from bench.config import ConfigError


def this_script() -> dict[str, Any]:
    """What a record's `environment` says of the script, beside the harness's own commit."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return script_facts(Path(file) if file else None, sys.argv)


def script_facts(script: Path | None, argv: Sequence[str]) -> dict[str, Any]:
    """`script_commit`, `script_dirty` and `argv`; null where the script lies in no repository.

    Paths in the repository are told from its root, of others only the name: they say whose machine it was.
    """
    folder = None if script is None else script.resolve().parent
    top = None if folder is None else git(folder, "rev-parse", "--show-toplevel")
    root = None if top is None else Path(top)
    commit = None if root is None else git(root, "rev-parse", "HEAD")
    changes = None if root is None or commit is None else git(root, "status", "--porcelain")
    return {
        "script_commit": commit,
        "script_dirty": None if changes is None else bool(changes),
        "argv": [_shortened(word, root) for word in argv],
    }


def _shortened(word: str, root: Path | None) -> str:
    """An argument, or what stands after its first `=`, without the folders of this machine."""
    name, sign, value = word.rpartition("=") if word.count("=") == 1 else ("", "", word)
    path = Path(value)
    if not path.is_absolute():
        return word
    if root is not None and path.is_relative_to(root):
        return f"{name}{sign}{path.relative_to(root)}"
    return f"{name}{sign}.../{path.name}"


def say(text: str, where: TextIO | None = None) -> None:
    """A line of ours, by default among the warnings; a closed terminal ends no training."""
    with suppress(Exception):
        print(f"bench.observe: {text}", file=where or sys.stderr, flush=True)


def in_one_line(error: Exception) -> str:
    """`KeyError: 'scatter'`, and no more of an error whose text has many lines; only the text of our own."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ConfigError) else f"{type(error).__name__}: {first}".removesuffix(": ")
