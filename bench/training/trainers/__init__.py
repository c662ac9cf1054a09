"""Training loops, with one file for each trainer of `TRAINER_FACTS`. May import what lies below training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.training.trainers.trainer import Trainer


def trainer_code(name: str) -> type[Trainer]:
    """Return the class of a trainer, imported only when it runs, because its package may be missing."""
    code: type[Trainer] = importlib.import_module(f"bench.training.trainers.{name}").TRAINER
    return code
