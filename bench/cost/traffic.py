"""What one rank sends in a step, by purpose, and the messages of parameters and gradients behind it.

Payload as the record's `engagement.sent_bytes` counts it: of b bytes that each of G ranks holds, an
all-gather sends (G-1)b, a reduce-scatter of G shards of b too, an all-reduce 2(G-1)/G of b, a broadcast b.
Every rank sends the same: engines pad what does not divide. The step is one of many: DDP sets up its buckets
in its first two, and ZeRO-3 looks at the order of modules in the first two micro-steps that have it, in
which it gathers more. Of our own trainer: training stacks count losses and tokens in their own way.
Attention's bytes are exact; those of parameters and gradients are estimates, as engines may cache and bundle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bench.config import DTYPE_BYTES, NOT_USED, ModelConfig, RunConfig
from bench.cost.engine_memory import (
    MAX_LIVE_PARAMETERS,
    MAX_SUB_GROUP,
    PERSISTENCE_THRESHOLD,
    REDUCE_BUCKET,
)
from bench.cost.weights import (
    FLOAT32_BYTES,
    TrainedTensor,
    embedding,
    ends,
    head,
    in_modules,
    last_norm,
    layer_modules,
    one_layer_parameters,
    trained_tensors,
    wide_bytes,
)
from bench.strategies import STRATEGIES
from bench.strategies.schedule import Exchange

ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS = "attention", "parameters", "gradients", "data_and_loss"
SMALL_BYTES = 1024
"""An all-reduce or reduce of less counts as one of counts, losses and norms; more are gradients."""
FLOAT64_BYTES, COUNT_BYTES = 8, 8
NATIVE = "native"
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP sends a bucket once it holds so much: `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`, and the default
of `bucket_cap_mb`."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Equal calls to the communication library in one step."""

    purpose: str
    exchange: Exchange
    count: int = 1

    @property
    def sent_bytes(self) -> int:
        return self.count * self.exchange.sent_bytes


def payload(cell: RunConfig) -> dict[str, int] | None:
    """Bytes that one rank sends in one step, by purpose; None where no formula is known."""
    facts = STRATEGIES.get(cell.strategy)
    # Whether all that a step sends is the engine's or attention's.
    is_known = cell.engine.name == NOT_USED or (cell.engine.name in OF_ENGINE and cell.trainer == NATIVE)
    if facts is None or not is_known:
        return None
    sent = Counter({ATTENTION: facts.exchange_bytes(cell)})
    for each in messages(cell):
        sent[each.purpose] += each.sent_bytes
    return {purpose: sent[purpose] for purpose in (ATTENTION, PARAMETERS, GRADIENTS, DATA_AND_LOSS)}


def messages(cell: RunConfig) -> tuple[Messages, ...]:
    """All of one step but attention's, equal ones together; none of an engine that is not ours."""
    if cell.engine.name not in OF_ENGINE:
        return ()
    counted = _all_reduce(COUNT_BYTES, cell.cluster.world_size)  # of valid tokens
    made = itertools.chain([counted], OF_ENGINE[cell.engine.name](cell))
    sent = Counter(each for each in made if each[1].ranks > 1)
    return tuple(Messages(*each, count) for each, count in sent.items())


Sent = tuple[str, Exchange]
"""A message and what it is for."""


def _gather(shard_bytes: int, ranks: int) -> Sent:
    return PARAMETERS, Exchange("all_gather", (ranks - 1) * shard_bytes, ranks)


def _reduce_scatter(shard_bytes: int, ranks: int) -> Sent:
    return GRADIENTS, Exchange("reduce_scatter", (ranks - 1) * shard_bytes, ranks)


def _all_reduce(handed_bytes: int, ranks: int, stride: int = 1) -> Sent:
    purpose = DATA_AND_LOSS if handed_bytes < SMALL_BYTES else GRADIENTS
    sent_bytes = round(handed_bytes * (2 * (ranks - 1) / ranks))
    return purpose, Exchange("all_reduce", sent_bytes, ranks, stride)


def _ddp(cell: RunConfig) -> Iterator[Sent]:
    """In the last micro-step all gradients, in the precision of the weights; before it, the model's buffers.

    Those are the rotary embedding's frequencies, twice, in float32 (DistributedDataParallel's
    `_sync_buffers`; none are sent after a micro-step in `no_sync`). Buckets are those of
    `compute_bucket_assignment_by_size`.
    """
    ranks = cell.cluster.world_size
    frequencies = 2 * (cell.model.head_dim // 2) * FLOAT32_BYTES
    yield PARAMETERS, Exchange("broadcast", frequencies, ranks)
    for bucket_bytes in _buckets(cell):
        yield _all_reduce(bucket_bytes, ranks)


def _buckets(cell: RunConfig) -> Iterator[int]:
    """Bytes of each: tensors in the order of backward, until there are enough."""
    limit, held = FIRST_BUCKET_BYTES, 0
    for tensor in _in_backward(cell):
        held += tensor.count * wide_bytes(cell)
        if held >= limit:
            yield held
            limit, held = BUCKET_BYTES, 0
    if held:
        yield held


def _fsdp2(cell: RunConfig) -> Iterator[Sent]:
    """Layer by layer, and the rest as one: gathered for forward and for backward, which the rest outlives.

    Each tensor is split along its first dimension, and padded (`FSDPParam._init_sharded_param`). Gradients
    are reduced in the last micro-step, in float32 at least, and then among replicas (`foreach_reduce`). The
    gradient's norm is that of all tensors' norms, which are reduced together (`clip_grad_norm_`).
    """
    ranks = max(1, cell.cluster.world_size // cell.dp_replicate)  # an illegal cell has too many replicas
    model, e, wide = cell.model, DTYPE_BYTES[cell.dtype], wide_bytes(cell)

    def shard(tensors: Iterable[TrainedTensor]) -> int:
        return sum(math.ceil(tensor.rows / ranks) * tensor.columns for tensor in tensors)

    rest, layer = shard(ends(model)), shard(in_modules(layer_modules(model)))
    for _ in range(cell.grad_accum):
        yield _gather(rest * e, ranks)
        yield from [_gather(layer * e, ranks)] * (2 * model.num_layers)
    for group in (rest, *[layer] * model.num_layers):
        yield _reduce_scatter(group * wide, ranks)
        yield _all_reduce(group * wide, cell.dp_replicate, stride=ranks)
    yield _all_reduce(len(trained_tensors(model)) * wide, ranks)


def _zero3(cell: RunConfig) -> Iterator[Sent]:
    """Tensor by tensor, each flat and padded (`Init._partition_param`), over all ranks, in the cell's dtype.

    Small ones stay whole and are gathered one by one after the update (`_post_step`), the others in every
    micro-step. So are all gradients reduced, in buckets (`reduce_independent_p_g_buckets_and_remove_grads`,
    `reduce_scatter_coalesced`).
    """
    ranks, e = cell.cluster.world_size, DTYPE_BYTES[cell.dtype]

    def shard(tensors: Iterable[TrainedTensor]) -> int:
        return e * sum(math.ceil(tensor.count / ranks) for tensor in tensors)

    gathered = [_gather(shard([tensor]), ranks) for tensor in _gathered(cell.model)]
    reduced = [_reduce_scatter(shard(bucket), ranks) for bucket in _reduced_together(cell)]
    yield from (gathered + reduced) * cell.grad_accum
    whole = (tensor for tensor in trained_tensors(cell.model) if stays_whole(tensor))
    yield from (_gather(shard([tensor]), ranks) for tensor in whole)
    norm_bytes = FLOAT32_BYTES if cell.offload.optimizer else FLOAT64_BYTES
    for _ in range(_updated_apart(cell)):
        yield _all_reduce(norm_bytes, ranks)


def stays_whole(tensor: TrainedTensor) -> bool:
    """Return whether ZeRO-3 keeps the tensor whole on every rank."""
    return tensor.count <= PERSISTENCE_THRESHOLD


def _gathered(model: ModelConfig) -> list[TrainedTensor]:
    """Of one micro-step, about: each tensor once for forward and once for backward, or once for both if kept.

    The output head is kept, and as many of the last layers as fit beside it into `MAX_LIVE_PARAMETERS`; where
    all layers fit, so does everything. A replay of DeepSpeed 0.19's coordinator gathered up to 2 % less of
    models from 1.5 to 32 billion weights, and a third more of those with half a billion.
    """
    kept = (MAX_LIVE_PARAMETERS - head(model).count) // one_layer_parameters(model)
    again = model.num_layers - min(model.num_layers, max(0, kept))
    outer = (embedding(model), embedding(model), head(model)) if again else ends(model)
    tensors = (*outer, *in_modules(layer_modules(model)) * (model.num_layers + again))
    return [tensor for tensor in tensors if not stays_whole(tensor)]


def _reduced_together(cell: RunConfig) -> Iterator[list[TrainedTensor]]:
    """Tensors in the order of backward, as many as a bucket has room for, and each that is larger."""
    bucket: list[TrainedTensor] = []
    for tensor in _in_backward(cell):
        if bucket and sum(each.count for each in (*bucket, tensor)) > REDUCE_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def _updated_apart(cell: RunConfig) -> int:
    """Groups of tensors that are updated at once, each of which has a norm (`_create_fp16_sub_groups`)."""
    ranks, groups, held = cell.cluster.world_size, 1, 0
    for tensor in trained_tensors(cell.model)[:-1]:
        held += math.ceil(tensor.count / ranks)
        if held >= MAX_SUB_GROUP:
            groups, held = groups + 1, 0
    return groups


def _in_backward(cell: RunConfig) -> Iterator[TrainedTensor]:
    """Each tensor once, in the order in which backward has its gradient."""
    model = cell.model
    if not model.tied_embeddings:
        yield head(model)
    yield last_norm(model)
    for layer in reversed(range(model.num_layers)):
        yield from in_modules(tuple(reversed(layer_modules(model, layer))))
    yield embedding(model)


OF_ENGINE: Mapping[str, Callable[[RunConfig], Iterator[Sent]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero3": _zero3,
}
