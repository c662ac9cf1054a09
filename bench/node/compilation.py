"""What ranks have compilers build: a package's operators are built where they are first used, for minutes.

Linux only: elsewhere no compilation is seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOOK_S = 1.0
"""How often to look at the most."""
PROC = Path("/proc")
NINJA = "ninja"
COMPILERS = frozenset({"c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc", "hipcc"})
"""Programs that packages start without ninja."""
ONCE = "once on this machine, for a minute or two"
_PACKAGE = re.compile(r"(?:site|dist)-packages/(\w+)/\S+\.(?:c|cc|cpp|cu)\b")
"""Whose source a line of a build file compiles."""


class CompilationWatch:
    """Looks now and then whether any of a cell's ranks has something compiled."""

    def __init__(self) -> None:
        self._looked_s: float | None = None
        self._found: str | None = None

    def found(self, now_s: float, pids: Iterable[int]) -> str | None:
        """`deepspeed compiles its operator cpu_adam, ...`; None where no compiler runs."""
        if self._looked_s is None or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._found = next(filter(None, map(compiled_by, pids)), None)
        return self._found


def compiled_by(pid: int) -> str | None:
    """What a process of which this is the main thread has compiled; None where it has started no compiler.

    Packages build with torch.utils.cpp_extension, whose ninja runs in the folder of the operator.
    """
    with suppress(OSError, ValueError):
        for child in (PROC / str(pid) / "task" / str(pid) / "children").read_text().split():
            name = (PROC / child / "comm").read_text().strip()
            if name == NINJA:
                return _operator((PROC / child / "cwd").readlink())
            if name in COMPILERS:
                return f"a package compiles with {name}, {ONCE}"
    return None


def _operator(folder: Path) -> str:
    build = folder / "build.ninja"
    source = _PACKAGE.search(build.read_text()) if build.exists() else None
    who = "a package" if source is None else source[1]
    return f"{who} compiles its operator {folder.name}, {ONCE}"
