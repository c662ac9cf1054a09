"""Messages that engines send in a step, and their purposes. No torch.

Bytes are payload, as in `engagement.sent_bytes` of a record. With b bytes on each of G ranks, a rank sends
(G-1)b in an all-gather, 2(G-1)/G of b in an all-reduce and b in a broadcast; in a reduce-scatter of G shards
of b bytes it sends (G-1)b. All ranks send the same number of bytes, because engines pad uneven tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.strategies.schedule import Communication

ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS = "attention", "parameters", "gradients", "data_and_loss"
SMALL_BYTES = 1024
"""Size from which an all-reduce or reduce counts as one of gradients; a smaller one has counts, losses or
norms."""

Sent = tuple[str, Communication]
"""Purpose of one message, and the message."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Equal calls to the communication library in one step."""

    purpose: str
    communication: Communication
    count: int = 1

    @property
    def sent_bytes(self) -> int:
        return self.count * self.communication.sent_bytes


def all_gather(shard_bytes: int, ranks: int) -> Sent:
    """Return the all-gather of parameters of which every rank holds a shard of `shard_bytes`."""
    return PARAMETERS, Communication("all_gather", (ranks - 1) * shard_bytes, ranks)


def reduce_scatter(shard_bytes: int, ranks: int) -> Sent:
    """Return the reduce-scatter after which every rank has its shard, `shard_bytes`, of summed gradients."""
    return GRADIENTS, Communication("reduce_scatter", (ranks - 1) * shard_bytes, ranks)


def all_reduce(tensor_bytes: int, ranks: int, stride: int = 1) -> Sent:
    """Return the all-reduce that sums gradients, or a few numbers, on every rank."""
    purpose = DATA_AND_LOSS if tensor_bytes < SMALL_BYTES else GRADIENTS
    sent_bytes = round(tensor_bytes * (2 * (ranks - 1) / ranks))
    return purpose, Communication("all_reduce", sent_bytes, ranks, stride)
