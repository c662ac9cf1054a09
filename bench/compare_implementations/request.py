"""What a set of processes is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_AT = "look_at_"
"""The name of a phase, before the number of the cell that is looked at."""
REQUEST = "request.json"
"""In the ranks' folder: what all are asked."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a set of processes is asked."""

    cells: list[dict[str, Any]]
    budget_s: float
    """For all turns; the fewest are taken whatever they take."""
    is_first: bool
    """Whether bytes, memory and errors are looked at: they are the same in every set."""

    @classmethod
    def read(cls, folder: Path) -> Request:
        return cls(**json.loads((folder / REQUEST).read_text()))
