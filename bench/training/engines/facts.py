"""Base class of the facts of an engine, which are known without running it. Must not import torch.

Formulas use the symbols of `bench.cost.memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from bench.config import LOW_PRECISION, Cell
from bench.training.messages import EngineMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of weights, gradients and optimizer state on one rank, for the sums of `bench.cost.memory`."""

    states: int
    """Parameters and optimizer state, and gradients where they exist before backward begins."""
    gathered: int
    """Peak of the weights gathered from other ranks, or of low-precision copies of this rank's weights."""
    spare: int = 0
    """Part of `gathered` that the engine may free earlier; the lower bound of the estimate leaves it out."""
    beyond: int = 0
    """Gathered bytes that only the upper bound of the estimate has; the engine's own limit allows them."""
    kept_head_gradient: int
    """Whole gradient of a tied output head, while it waits for the gradient of the embedding."""
    layer_gradients: int
    """Unsharded gradients of one layer in its backward, and of a tied output head."""
    arriving: int = 0
    """Gradients of all other layers. None of them exist when backward starts, and all of them when it reaches
    the layer that it computes last."""
    update: int = 0
    """Gradients at the end of a step, as the engine reduces them and as the optimizer takes them."""
    loading: int
    """Weights while the model is built, when none of the other terms exist."""


class EngineHost(NamedTuple):
    """Milliseconds of an engine's Python code on a typical host: per layer of a micro-step, and per step."""

    layer_ms: float
    checkpointed_layer_ms: float
    step_ms: float


NOT_MEASURED = EngineHost(0, 0, 0)
"""Value for engines whose host time is unknown; predictions then leave it out."""


class EngineFacts(ABC):
    """Facts of one engine."""

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    package: ClassVar[str | None] = None
    """Distribution whose code runs; None for torch."""
    wrapper: ClassVar[str | None] = None
    """Class in a wrapped model by which `bench.observe` recognises the engine."""
    autocasts: ClassVar[bool] = False
    """True if weights stay float32 and autocast lowers the precision of matrix products."""
    offloads_optimizer: ClassVar[bool] = False
    """True if the optimizer can run in host memory (`offload.optimizer`)."""
    shards_over_all_ranks: ClassVar[bool] = False
    """True if the engine keeps no replicas, so that `dp_replicate` counts as `dp_shard`."""
    has_leaf: ClassVar[bool] = False
    """True if the modules that have the engine's hooks can be chosen (`engine.leaf`)."""
    recomputes_last_product: ClassVar[bool] = False
    """True if a linear layer saves its input after its product, which a checkpoint thus recomputes."""
    copies_in_update: ClassVar[bool] = False
    """True if the engine scales and copies gradients in separate passes before the optimizer takes them."""
    host: ClassVar[Mapping[str, EngineHost]] = {}
    """Host time by the value of `engine.leaf`; values without an entry are NOT_MEASURED."""

    def is_autocast(self, cell: Cell) -> bool:
        """Return whether weights stay float32 in this cell and autocast casts them for matrix products."""
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
        """Return the bytes of weights, gradients and optimizer state on one rank of a cell."""

    @abstractmethod
    def messages(self, cell: Cell) -> Iterator[EngineMessage]:
        """Yield the collectives of parameters, gradients and norms that one rank calls in one step."""
