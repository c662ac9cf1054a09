"""Where torch compiles DeepSpeed's operators: a folder for each environment, without abandoned locks.

Environments that share a folder compile each other's operators again. The lock of a process that was killed
while it compiled makes all later ones wait for ever.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path

import psutil

VARIABLE = "TORCH_EXTENSIONS_DIR"


def settle_extensions() -> None:
    """Name this environment's folder, unless the user has named one, and remove the locks left in it."""
    folder = Path(os.environ.setdefault(VARIABLE, str(_own_folder())))
    for lock in folder.rglob("lock"):
        found = _made(lock)
        # While all processes were inspected, another may have released this lock and made a new one.
        if found is not None and lock.is_file() and not is_held(lock) and _made(lock) == found:
            lock.unlink(missing_ok=True)


def is_held(lock: Path) -> bool:
    """Whether a process has the file open, as torch's file baton does while it compiles."""
    target = lock.resolve()
    for process in psutil.process_iter():
        try:
            if any(Path(opened.path) == target for opened in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False


def _made(lock: Path) -> tuple[int, int] | None:
    """What differs between a file and a later one of its name; None where there is none."""
    try:
        status = lock.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def _own_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment = f"{sys.prefix} {sys.version} {importlib.metadata.version('torch')}"
    name = hashlib.sha256(environment.encode()).hexdigest()[:12]
    return cache / "ulysses-ring-bench" / "torch_extensions" / name
