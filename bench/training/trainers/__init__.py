"""Training loops: one file for each trainer of `TRAINER_FACTS`. May import what lies below training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.training.trainers.trainer import Trainer


def trainer_code(name: str) -> type[Trainer]:
    """Import and return the class of a trainer; the package that it needs may be missing."""
    code: type[Trainer] = importlib.import_module(f"bench.training.trainers.{name}").TRAINER
    return code
