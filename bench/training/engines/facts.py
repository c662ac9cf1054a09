"""Facts of an engine that need no torch: legal cells, memory, messages and time of the host.

Written for the formulas as in `bench.cost.memory`.
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
    """Weights of other shards, or low-precision copies, that are held at once."""
    spare: int = 0
    """Part of `gathered` that such an engine can do without."""
    beyond: int = 0
    """Bytes beyond `gathered` at the engine's own limit."""
    kept_head_gradient: int
    """One whole gradient of the output head where it waits for the embedding's, to which the head is tied."""
    layer_gradients: int
    """Whole gradients in a layer's backward: the layer's, and a tied head's."""
    arriving: int = 0
    """Gradients of all other layers, there by the last layer's backward and not before the first's."""
    update: int = 0
    """Gradients at a step's end, as the engine reduces them and as the optimizer takes them."""
    loading: int
    """Bytes while the model is built."""


class EngineHost(NamedTuple):
    """Milliseconds of Python that an engine adds to a step, beyond torch's operators, on an expected host."""

    layer_ms: float
    """Forward and backward of one layer in one micro-step."""
    checkpointed_layer_ms: float
    """Forward and backward of one layer whose forward backward computes again."""
    step_ms: float
    """Work once a step, whatever the number of layers."""


NOT_MEASURED = EngineHost(0, 0, 0)


class EngineFacts(ABC):
    """Facts of one engine."""

    name: ClassVar[str]
    """Key in the table, folder and YAML."""
    dtypes: ClassVar[tuple[str, ...]]
    """Dtypes it can train in."""
    package: ClassVar[str | None] = None
    """Distribution whose code runs; None for torch."""
    wrapper: ClassVar[str | None] = None
    """Class, among a wrapped model's, by which `bench.observe` recognises the engine."""
    autocasts: ClassVar[bool] = False
    """True where weights stay float32, and autocast lowers the precision of products."""
    offloads_optimizer: ClassVar[bool] = False
    """True where the optimizer can work in host memory: `offload.optimizer`."""
    has_leaf: ClassVar[bool] = False
    """True where modules can be chosen that have the engine's hooks: `engine.leaf`."""
    copies_in_update: ClassVar[bool] = False
    """True where gradients are scaled and copied in passes of their own before the optimizer takes them."""
    host: ClassVar[Mapping[str, EngineHost]] = {}
    """Time of the host by `engine.leaf`, NOT_MEASURED for others."""

    def is_autocast(self, cell: Cell) -> bool:
        """Return whether products in this cell cast float32 weights and their inputs."""
        return self.autocasts and cell.dtype in LOW_PRECISION and cell.dtype in self.dtypes

    def refusals(self, cell: Cell) -> list[str]:
        """Return why the engine cannot train this cell, each reason with a way out."""
        if cell.dtype in self.dtypes:
            return []
        dtypes = " or ".join(self.dtypes)
        return [f"dtype={cell.dtype} is not for engine={self.name}; choose dtype={dtypes}"]

    @abstractmethod
    def shards(self, cell: Cell) -> int:
        """Return the number of ranks that share the parameters which the optimizer updates."""

    @abstractmethod
    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes that the engine adds to one rank of a cell."""

    @abstractmethod
    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield the messages of parameters, gradients and norms that one rank sends in one step."""
