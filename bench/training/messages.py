"""Messages that engines send in a step, and the purposes by which a step's bytes are counted. No torch.

Payload is that of the record's `engagement.sent_bytes`: of b bytes that each of G ranks holds, an all-gather
sends (G-1)b, a reduce-scatter of G shards of b too, an all-reduce 2(G-1)/G of b, a broadcast b. Every rank
sends the same: engines pad what does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.strategies.schedule import Communication

ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS = "attention", "parameters", "gradients", "data_and_loss"
SMALL_BYTES = 1024
"""An all-reduce or reduce of less counts as one of counts, losses and norms; more are gradients."""

Sent = tuple[str, Communication]
"""Purpose of one message, and the message."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Equal calls to the communication library in one step."""

    purpose: str
    exchange: Communication
    count: int = 1

    @property
    def sent_bytes(self) -> int:
        return self.count * self.exchange.sent_bytes


def all_gather(shard_bytes: int, ranks: int) -> Sent:
    """Return the message that gathers parameters, of which each rank holds a shard."""
    return PARAMETERS, Communication("all_gather", (ranks - 1) * shard_bytes, ranks)


def reduce_scatter(shard_bytes: int, ranks: int) -> Sent:
    """Return the message that leaves each rank its shard of summed gradients."""
    return GRADIENTS, Communication("reduce_scatter", (ranks - 1) * shard_bytes, ranks)


def all_reduce(handed_bytes: int, ranks: int, stride: int = 1) -> Sent:
    """Return the message that sums gradients, or a few numbers, on every rank."""
    purpose = DATA_AND_LOSS if handed_bytes < SMALL_BYTES else GRADIENTS
    sent_bytes = round(handed_bytes * (2 * (ranks - 1) / ranks))
    return purpose, Communication("all_reduce", sent_bytes, ranks, stride)
