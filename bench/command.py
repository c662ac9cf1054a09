"""The command that goes on with a sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def again_command(arguments: Sequence[str], folder: Path, *words: str) -> str:
    """The command line that runs what is missing in a sweep's folder, with these words in place of its own.

    `arguments` are those of the sweep, as in `sys.argv`.
    """
    program, *given = arguments
    added = [*words, "resume=true", f"sweep_dir={folder}"]
    replaced = {*map(_key, added)}
    kept = [word for word in (word.removeprefix("++") for word in given) if _key(word) not in replaced]
    return shlex.join(["python", program, *kept, *added])


def _key(word: str) -> str:
    return word.partition("=")[0]
