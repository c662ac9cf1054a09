"""Where a rank is, kept where its launcher can read it whatever becomes of the rank."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

SIZE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Place:
    """The phase of a rank's life and of its step."""

    phase: str
    step_phase: str | None
    count: int = 0
    """How many places it has noted, this one among them."""


class PlaceFile:
    """A rank's own note of its place: memory that it shares with a file, so that noting is no system call."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no room for the file."""
        # Written before it is mapped: a page of a full disk would end the process when it is first touched.
        path.write_bytes(b" " * SIZE_BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        self._count = 0

    def note(self, phase: str, step_phase: str | None) -> None:
        """Keep this place, until the next one."""
        self._count += 1
        place = f"{self._count} {phase} {step_phase or ''}"
        self._map[:] = place.encode()[:SIZE_BYTES].ljust(SIZE_BYTES)


def read_place(path: Path) -> Place | None:
    """The place that a rank noted last; None where it never did."""
    try:
        count, *words = path.read_bytes().decode(errors="replace").split()
    except (OSError, ValueError):
        return None
    return Place(words[0], words[1] if len(words) > 1 else None, int(count))


def place_path(folder: Path, rank: int) -> Path:
    """Where a rank's place is kept in a cell's temporary folder."""
    return folder / f"rank_{rank}.place"
