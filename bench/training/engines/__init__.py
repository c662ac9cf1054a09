"""How parameters, gradients and optimizer state are sharded. May import what lies below training.

The one table of engines: a new one is a folder here, a line below and a YAML in conf/engine/. `facts.py` in
the folder is read by processes that must not import torch; `engine.py` runs on the ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.config import DTYPE_BYTES, Cell
from bench.training.engines.ddp.facts import DDPFacts
from bench.training.engines.facts import EngineFacts
from bench.training.engines.fsdp2.facts import FSDP2Facts
from bench.training.engines.zero3.facts import Zero3Facts
from bench.training.parameters import FLOAT32_BYTES

if TYPE_CHECKING:
    from bench.training.engines.engine import Engine

ENGINE_FACTS: Mapping[str, EngineFacts] = {
    facts.name: facts for facts in (DDPFacts(), FSDP2Facts(), Zero3Facts())
}
DEFAULT_ENGINE = "fsdp2"
"""Engine where neither the request nor `default_engine` in bench/request/resolve.py names another."""


def engine_code(name: str) -> type[Engine]:
    """Return an engine's code, imported only where ranks run."""
    code: type[Engine] = importlib.import_module(f"bench.training.engines.{name}.engine").ENGINE
    return code


def is_autocast(cell: Cell) -> bool:
    """Return whether weights stay float32, and products cast them and their inputs."""
    engine = ENGINE_FACTS.get(cell.engine.name)
    return engine is not None and engine.is_autocast(cell)


def stream_bytes(cell: Cell) -> int:
    """Return the bytes of a number between layers."""
    return FLOAT32_BYTES if is_autocast(cell) else DTYPE_BYTES[cell.dtype]
