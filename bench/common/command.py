"""What a person types: the command of an installed copy, or a checkout's script and modules."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = "run_sweep.py"
COMMAND = "ulysses-ring-bench"
"""What an installed copy puts on the path."""
KEEP_ANY = "resume=any"
"""A choice that a resumed sweep has made already."""
TOOLS: Mapping[str, str] = {
    "report": "analysis.report",
    "compare": "analysis.compare",
    "agent": "bench.extras.nodes",
}
"""What the command's first word may be, and the module that `python -m` takes for the same."""


def is_sweep(program: str) -> bool:
    """Whether a command line beginning with this program, as in `sys.argv`, can be that of a sweep."""
    return Path(program).name in (SCRIPT, COMMAND)


def sweep_command(program: str | None = None) -> list[str]:
    """The words before those of a sweep, typed as this program was: by default the one that runs."""
    program = sys.argv[0] if program is None else program
    if Path(program).name == COMMAND:
        # A record may come from another machine; one that is here and not on the path is named in full.
        return [program if Path(program).exists() and shutil.which(COMMAND) != program else COMMAND]
    is_checkout = (CHECKOUT / SCRIPT).with_name("pyproject.toml").exists()
    return [COMMAND] if not is_checkout else ["python", program if is_sweep(program) else SCRIPT]


def sweep_words() -> str:
    """What a user types to start a sweep: `python run_sweep.py`, or `ulysses-ring-bench`."""
    return shlex.join(sweep_command())


def tool_words(module: str) -> str:
    """What runs one of TOOLS here: `python -m analysis.report`, or `ulysses-ring-bench report`."""
    command = sweep_command()
    if command[0] == "python":
        return f"python -m {module}"
    word = next(word for word, its in TOOLS.items() if its == module)
    return shlex.join([*command, word])


def again_command(arguments: Sequence[str], folder: Path, *words: str) -> str:
    """The command line that runs what is missing in a sweep's folder, with these words in place of its own.

    `arguments` are those of the sweep, as in `sys.argv`.
    """
    program, *typed = arguments
    given = [word.removeprefix("++") for word in typed]
    added = [*words, KEEP_ANY if KEEP_ANY in given else "resume=true", f"sweep_dir={folder}"]
    replaced = {*map(_key, added)}
    kept = [word for word in given if _key(word) not in replaced]
    return shlex.join([*sweep_command(program), *kept, *added])


class _Descriptor(io.FileIO):
    """Standard output or error that discards text once its reader has gone, as in `| head`."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Let this command finish, and write its files, where the reader of what it prints has gone.

    Streams that were replaced, as tests do, stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        buffer = io.BufferedWriter(_Descriptor(stream.fileno(), "w", closefd=False))
        ways = {
            each: getattr(stream, each) for each in ("encoding", "errors", "line_buffering", "write_through")
        }
        setattr(sys, name, io.TextIOWrapper(buffer, **ways))


def _key(word: str) -> str:
    return word.partition("=")[0]
