"""Command lines that messages quote: the command of an installed copy, or a checkout's script and modules."""

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
"""Folder that contains `bench`."""
SCRIPT = "run_sweep.py"
COMMAND = "ulysses-ring-bench"
"""Command of an installed copy."""
KEEP_ANY = "resume=any"
"""Option that keeps the records of earlier sweeps, made with any code and device."""
TOOLS: Mapping[str, str] = {
    "report": "analysis.report",
    "compare": "analysis.compare",
    "trace": "analysis.trace",
}
"""Subcommands of the installed command, with the module that `python -m` runs for each in a checkout. Without
a subcommand the command runs a sweep."""


def is_sweep(program: str) -> bool:
    """Return whether the first element of an `argv` is the script or the command that runs sweeps."""
    return Path(program).name in (SCRIPT, COMMAND)


def sweep_argv(program: str | None = None) -> list[str]:
    """Return the words that start a sweep, before its options.

    Args:
        program: First element of the `argv` of the sweep to run again, which is kept if it is the script or
            the command; by default that of this process.
    """
    program = sys.argv[0] if program is None else program
    if Path(program).name == COMMAND:
        # The path is kept if the program exists on this machine and is not the one that PATH finds.
        return [program if Path(program).exists() and shutil.which(COMMAND) != program else COMMAND]
    is_checkout = (CHECKOUT / SCRIPT).with_name("pyproject.toml").exists()
    return [COMMAND] if not is_checkout else ["python", program if is_sweep(program) else SCRIPT]


def sweep_command() -> str:
    """Return the text that starts a sweep: `python run_sweep.py` or `ulysses-ring-bench`."""
    return shlex.join(sweep_argv())


def tool_command(module: str) -> str:
    """Return the text that runs a module of TOOLS.

    In a checkout it is for example `python -m analysis.report`, else `ulysses-ring-bench report`.
    """
    command = sweep_argv()
    if command[0] == "python":
        return f"python -m {module}"
    word = next(word for word, tool in TOOLS.items() if tool == module)
    return shlex.join([*command, word])


def resume_command(arguments: Sequence[str], folder: Path, *words: str) -> str:
    """Return the command line that resumes a sweep: it runs the cells without a final record in the folder.

    Args:
        arguments: `sys.argv` of the sweep.
        folder: Folder of the sweep.
        *words: Options to add, which replace the sweep's options of the same name.
    """
    program, *typed = arguments
    options = [word.removeprefix("++") for word in typed]
    added = [*words, KEEP_ANY if KEEP_ANY in options else "resume=true", f"sweep_dir={folder}"]
    added_keys = {*map(_key, added)}
    unchanged = [word for word in options if _key(word) not in added_keys]
    return shlex.join([*sweep_argv(program), *unchanged, *added])


class _Descriptor(io.FileIO):
    """File descriptor of standard output or error that discards text once its reader has exited."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Let this command finish and write its files even if the reader of its output has exited.

    Streams that a test has replaced stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        buffer = io.BufferedWriter(_Descriptor(stream.fileno(), "w", closefd=False))
        names = ("encoding", "errors", "line_buffering", "write_through")
        settings = {setting: getattr(stream, setting) for setting in names}
        setattr(sys, name, io.TextIOWrapper(buffer, **settings))


def _key(word: str) -> str:
    return word.partition("=")[0]
