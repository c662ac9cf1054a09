"""Table of the engines, which shard parameters, gradients and optimizer state.

May import what lies below training. A new engine is a folder here, an entry in `ENGINE_FACTS` and a YAML file
in conf/engine/. Processes that must not import torch read the `facts.py` of a folder; the ranks run its
`engine.py`.
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
"""Engine of a request that names none, if `default_engine` in bench/request/resolve.py has no other."""


def engine_code(name: str) -> type[Engine]:
    """Import and return the class of an engine; only rank processes may call this."""
    code: type[Engine] = importlib.import_module(f"bench.training.engines.{name}.engine").ENGINE
    return code


def is_autocast(cell: Cell) -> bool:
    """Return whether weights stay float32 and autocast casts them, and activations, for matrix products."""
    engine = ENGINE_FACTS.get(cell.engine.name)
    return engine is not None and engine.is_autocast(cell)


def stream_bytes(cell: Cell) -> int:
    """Return the bytes of one element of the hidden states between layers."""
    return FLOAT32_BYTES if is_autocast(cell) else DTYPE_BYTES[cell.dtype]


def recomputes_last_product(cell: Cell) -> bool:
    """Return whether a checkpoint that ends with a linear layer recomputes its product."""
    engine = ENGINE_FACTS.get(cell.engine.name)
    return engine is not None and engine.recomputes_last_product
