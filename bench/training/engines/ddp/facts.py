"""Facts of DDP, which keeps the whole model on every rank and sums gradients."""

from __future__ import annotations

from collections.abc import Iterator

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.schedule import Communication
from bench.training.engines.facts import EngineFacts, EngineMemory
from bench.training.messages import PARAMETERS, EngineMessage, all_reduce
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.parameters import (
    FLOAT32_BYTES,
    head_parameters,
    one_layer_parameters,
    parameters,
    state_dtype_bytes,
    tensors_in_backward,
)

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes at which DDP reduces its first bucket of gradients and every other bucket. They are torch's
`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES` and the default of `bucket_cap_mb`."""


class DDPFacts(EngineFacts):
    name = "ddp"
    dtypes = ("bf16", "fp32", "fp64")
    wrapper = "DistributedDataParallel"
    autocasts = True

    def shards(self, cell: Cell) -> int:  # noqa: ARG002
        return 1

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of weights, gradients and optimizer state, which every rank holds whole.

        All three exist for the whole step, in float32 at least. Autocast keeps a low-precision copy of every
        weight for the whole step. The gradients of one layer, and of a tied output head, exist a second time
        until they are added to DDP's buckets.
        """
        count, state_bytes = parameters(cell.model), state_dtype_bytes(cell)
        dtype_bytes = DTYPE_BYTES[cell.dtype]
        kept_head = state_bytes * head_parameters(cell.model) if cell.model.tied_embeddings else 0
        return EngineMemory(
            states=(2 + OPTIMIZER_FACTS[cell.optimizer.name].moments) * state_bytes * count,
            gathered=dtype_bytes * count if self.is_autocast(cell) else 0,
            kept_head_gradient=kept_head,
            layer_gradients=dtype_bytes * one_layer_parameters(cell.model) + kept_head,
            loading=state_bytes * count,
        )

    def messages(self, cell: Cell) -> Iterator[EngineMessage]:
        """Yield a broadcast of the buffers, and an all-reduce for each bucket of gradients.

        The buffers are two copies of the rotary embedding's frequencies, in float32. DDP sends them once per
        step (`_sync_buffers`), because a forward that follows a micro-step in `no_sync` sends none. Gradients
        are reduced in the last micro-step, in the weights' dtype (`compute_bucket_assignment_by_size`).
        """
        ranks = cell.cluster.world_size
        frequencies = 2 * (cell.model.head_dim // 2) * FLOAT32_BYTES
        yield EngineMessage(PARAMETERS, Communication("broadcast", frequencies, ranks))
        for bucket_bytes in _buckets(cell):
            yield all_reduce(bucket_bytes, ranks)


def _buckets(cell: Cell) -> Iterator[int]:
    """Yield the bytes of each bucket, which takes tensors in the order of backward up to its limit."""
    limit, bucket_bytes = FIRST_BUCKET_BYTES, 0
    for tensor in tensors_in_backward(cell.model):
        bucket_bytes += tensor.count * state_dtype_bytes(cell)
        if bucket_bytes >= limit:
            yield bucket_bytes
            limit, bucket_bytes = BUCKET_BYTES, 0
    if bucket_bytes:
        yield bucket_bytes
