"""Facts of DDP, which keeps the whole model on every rank and sums gradients."""

from __future__ import annotations

from collections.abc import Iterator

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.schedule import Communication
from bench.training.engines.facts import EngineFacts, EngineMemory
from bench.training.messages import PARAMETERS, Sent, all_reduce
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.parameters import (
    FLOAT32_BYTES,
    head_parameters,
    one_layer_parameters,
    parameters,
    tensors_in_backward,
    wide_bytes,
)

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes at which DDP sends the first bucket and all others: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`
and the default of `bucket_cap_mb`."""


class DDPFacts(EngineFacts):
    name = "ddp"
    dtypes = ("bf16", "fp32", "fp64")
    wrapper = "DistributedDataParallel"
    autocasts = True

    def shards(self, cell: Cell) -> int:  # noqa: ARG002
        return 1

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of unsharded states.

        Autocast keeps a low-precision copy of every weight for the whole step.
        """
        count, e, wide = parameters(cell.model), DTYPE_BYTES[cell.dtype], wide_bytes(cell)
        kept_head = wide * head_parameters(cell.model) if cell.model.tied_embeddings else 0
        return EngineMemory(
            states=(2 + OPTIMIZER_FACTS[cell.optimizer.name].moments) * wide * count,
            gathered=e * count if self.is_autocast(cell) else 0,
            kept_head_gradient=kept_head,
            layer_gradients=e * one_layer_parameters(cell.model) + kept_head,
            loading=wide * count,
        )

    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield a broadcast of the buffers, and an all-reduce for each bucket of gradients.

        The buffers are the rotary embedding's frequencies, twice, in float32 (`_sync_buffers` of
        DistributedDataParallel; none are sent after a micro-step in `no_sync`). Gradients are those of the
        last micro-step, in the dtype of the weights. `compute_bucket_assignment_by_size` makes the buckets.
        """
        ranks = cell.cluster.world_size
        frequencies = 2 * (cell.model.head_dim // 2) * FLOAT32_BYTES
        yield PARAMETERS, Communication("broadcast", frequencies, ranks)
        for bucket_bytes in _buckets(cell):
            yield all_reduce(bucket_bytes, ranks)


def _buckets(cell: Cell) -> Iterator[int]:
    """Yield the size of each bucket, which collects tensors in the order of backward up to its limit."""
    limit, bucket_bytes = FIRST_BUCKET_BYTES, 0
    for tensor in tensors_in_backward(cell.model):
        bucket_bytes += tensor.count * wide_bytes(cell)
        if bucket_bytes >= limit:
            yield bucket_bytes
            limit, bucket_bytes = BUCKET_BYTES, 0
    if bucket_bytes:
        yield bucket_bytes
