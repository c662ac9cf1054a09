"""Collectives of parameters, gradients and norms that engines call in a step. Must not import torch.

Sizes are payload, the bytes that a rank sends to other ranks. With b bytes on each of G ranks these are
(G-1)b in an all-gather, 2b(G-1)/G in an all-reduce and b in a broadcast. A reduce-scatter of G shards of b
bytes sends (G-1)b. All ranks send the same number of bytes, because engines pad uneven tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bench.strategies.schedule import Communication

ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS = "attention", "parameters", "gradients", "data_and_loss"
SMALL_BYTES = 1024
"""Minimum size of an all-reduce or reduce of gradients. A smaller one sums counts, losses or norms, and its
purpose is DATA_AND_LOSS."""


class EngineMessage(NamedTuple):
    """One collective of an engine."""

    purpose: str
    """PARAMETERS, GRADIENTS or DATA_AND_LOSS."""
    communication: Communication


@dataclass(frozen=True, slots=True)
class Messages:
    """Collectives or sends of one step that are equal in purpose, kind, size and ranks."""

    purpose: str
    communication: Communication
    count: int = 1
    """Number of these calls in one step."""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of all calls together."""
        return self.count * self.communication.sent_bytes


def all_gather(shard_bytes: int, ranks: int) -> EngineMessage:
    """Return an all-gather of parameters over `ranks` ranks, each with a shard of `shard_bytes`."""
    return EngineMessage(PARAMETERS, Communication("all_gather", (ranks - 1) * shard_bytes, ranks))


def reduce_scatter(shard_bytes: int, ranks: int) -> EngineMessage:
    """Return the reduce-scatter of gradients, which leaves a summed shard of `shard_bytes` on every rank."""
    return EngineMessage(GRADIENTS, Communication("reduce_scatter", (ranks - 1) * shard_bytes, ranks))


def all_reduce(tensor_bytes: int, ranks: int, stride: int = 1) -> EngineMessage:
    """Return the all-reduce of gradients, or of a few numbers, in a group with a `stride` between ranks."""
    purpose = DATA_AND_LOSS if tensor_bytes < SMALL_BYTES else GRADIENTS
    sent_bytes = round(tensor_bytes * (2 * (ranks - 1) / ranks))
    return EngineMessage(purpose, Communication("all_reduce", sent_bytes, ranks, stride))
