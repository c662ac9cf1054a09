"""Base class of an engine's facts: legal cells, memory, messages and time of the host. No torch.

Formulas use the symbols of `bench.cost.memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from bench.config import LOW_PRECISION, Cell
from bench.training.messages import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes that an engine adds to one rank."""

    states: int
    """Parameters and optimizer state, and gradients where they exist before backward begins."""
    gathered: int
    """Largest sum of weights of other shards, or of low-precision copies."""
    spare: int = 0
    """Part of `gathered` that the engine can do without."""
    beyond: int = 0
    """Further gathered bytes that the engine may hold, up to its own limit."""
    kept_head_gradient: int
    """Whole gradient of a tied output head, while it waits for the gradient of the embedding."""
    layer_gradients: int
    """Whole gradients of a layer in its backward, and of a tied output head."""
    arriving: int = 0
    """Gradients of all other layers. All of them exist when backward reaches its last layer, and none when it
    starts."""
    update: int = 0
    """Gradients at the end of a step, in the copies that the engine reduces and that the optimizer takes."""
    loading: int
    """Bytes while the model is built."""


class EngineHost(NamedTuple):
    """Milliseconds of an engine's Python code in a step on a typical host, without torch's operators."""

    layer_ms: float
    """Forward and backward of one layer in one micro-step."""
    checkpointed_layer_ms: float
    """Forward and backward of one checkpointed layer, whose forward runs twice."""
    step_ms: float
    """Work per step that does not depend on the number of layers."""


NOT_MEASURED = EngineHost(0, 0, 0)


class EngineFacts(ABC):
    """Facts of one engine."""

    name: ClassVar[str]
    """Name of the engine: its key in the table, its folder and its YAML file."""
    dtypes: ClassVar[tuple[str, ...]]
    """Dtypes in which the engine can train."""
    package: ClassVar[str | None] = None
    """Distribution whose code runs; None for torch."""
    wrapper: ClassVar[str | None] = None
    """Class in a wrapped model by which `bench.observe` recognises the engine."""
    autocasts: ClassVar[bool] = False
    """True if weights stay float32 and autocast lowers the precision of matrix products."""
    offloads_optimizer: ClassVar[bool] = False
    """True if the optimizer can run in host memory (`offload.optimizer`)."""
    has_leaf: ClassVar[bool] = False
    """True if the modules that have the engine's hooks can be chosen (`engine.leaf`)."""
    copies_in_update: ClassVar[bool] = False
    """True if the engine scales and copies gradients in separate passes before the optimizer takes them."""
    host: ClassVar[Mapping[str, EngineHost]] = {}
    """Time of the host by `engine.leaf`; NOT_MEASURED for values without an entry."""

    def is_autocast(self, cell: Cell) -> bool:
        """Return whether matrix products of this cell cast float32 weights and activations."""
        return self.autocasts and cell.dtype in LOW_PRECISION and cell.dtype in self.dtypes

    def refusals(self, cell: Cell) -> list[str]:
        """Return the reasons why the engine cannot train this cell, each with a way out."""
        if cell.dtype in self.dtypes:
            return []
        dtypes = " or ".join(self.dtypes)
        return [f"engine={self.name} does not support dtype={cell.dtype}; choose dtype={dtypes}"]

    @abstractmethod
    def shards(self, cell: Cell) -> int:
        """Return the number of shards into which optimizer states are divided."""

    @abstractmethod
    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes that the engine adds to one rank of a cell."""

    @abstractmethod
    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield the messages with parameters, gradients and norms that one rank sends in one step."""
