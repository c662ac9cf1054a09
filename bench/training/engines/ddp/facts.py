"""DDP: every rank holds the whole model; gradients are summed."""

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
    in_backward,
    one_layer_parameters,
    parameters,
    wide_bytes,
)

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Bytes after which DDP sends a bucket: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, and the default of
`bucket_cap_mb`."""


class DDPFacts(EngineFacts):
    name = "ddp"
    dtypes = ("bf16", "fp32", "fp64")
    wrapper = "DistributedDataParallel"
    autocasts = True

    def shards(self, cell: Cell) -> int:  # noqa: ARG002
        return 1

    def memory(self, cell: Cell) -> EngineMemory:
        """Return all bytes on every rank; autocast keeps a low-precision copy of each weight for the step."""
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
        """Yield the last micro-step's gradients in the precision of the weights, and before them the buffers.

        Those are the rotary embedding's frequencies, twice, in float32 (DistributedDataParallel's
        `_sync_buffers`; none are sent after a micro-step in `no_sync`). Buckets are those of
        `compute_bucket_assignment_by_size`.
        """
        ranks = cell.cluster.world_size
        frequencies = 2 * (cell.model.head_dim // 2) * FLOAT32_BYTES
        yield PARAMETERS, Communication("broadcast", frequencies, ranks)
        for bucket_bytes in _buckets(cell):
            yield all_reduce(bucket_bytes, ranks)


def _buckets(cell: Cell) -> Iterator[int]:
    """Yield the bytes of each bucket: tensors in the order of backward, until there are enough."""
    limit, held = FIRST_BUCKET_BYTES, 0
    for tensor in in_backward(cell.model):
        held += tensor.count * wide_bytes(cell)
        if held >= limit:
            yield held
            limit, held = BUCKET_BYTES, 0
    if held:
        yield held
