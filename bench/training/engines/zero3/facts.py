"""Facts of ZeRO-3, with which DeepSpeed shards parameters, gradients and optimizer state over all ranks.

Constants are DeepSpeed's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from bench.config import DTYPE_BYTES, NOT_USED, Cell, ModelConfig
from bench.training.engines.facts import EngineFacts, EngineHost, EngineMemory
from bench.training.messages import Sent, all_gather, all_reduce, reduce_scatter
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.parameters import (
    FLOAT32_BYTES,
    TrainedTensor,
    embedding,
    flatten_modules,
    head,
    head_parameters,
    layer_modules,
    layer_parameters,
    one_layer_parameters,
    parameters,
    tensors_in_backward,
    tensors_outside_layers,
    trained_tensors,
)

MAX_REUSE_DISTANCE = 1_000_000_000
"""Default of `stage3_max_reuse_distance`. A weight stays gathered if fewer parameters are used before it is
used again; the weights of the last layers therefore stay gathered from forward to backward."""
MAX_LIVE_PARAMETERS = 1_000_000_000
"""Default of `stage3_max_live_parameters`, the largest number of parameters that are gathered ahead."""
REDUCE_BUCKET = 500_000_000
"""Default of `reduce_bucket_size`, the number of elements of the buffer that collects gradients before they
are reduced. The buffer is allocated once, for a model of any size (`stage3.py`, `ipg_buckets`)."""
PERSISTENCE_THRESHOLD = 100_000
"""Default of `stage3_param_persistence_threshold`, the number of elements up to which a tensor stays whole on
every rank."""
MAX_SUB_GROUP = 1_000_000_000
"""Default of `sub_group_size`, the number of parameters that are updated at once."""
FLOAT64_BYTES = 8


class Zero3Facts(EngineFacts):
    name = "zero3"
    dtypes = ("bf16", "fp32")
    package = "deepspeed"
    offloads_optimizer = True
    has_leaf = True
    copies_in_update = True
    host: ClassVar[Mapping[str, EngineHost]] = {
        # One rank on an H100 (results/reference/h100): slope and intercept of steps with 1 and 28 layers,
        # less 8 us per operator. Gradients were reduced in smaller buckets than DeepSpeed's default; with
        # the default a CPU rank took a fifth less time.
        NOT_USED: EngineHost(25, 36, 53),
        # Scaled from leaf=none: one CPU rank with 14 layers of width 320, less the time of the model without
        # an engine, took 8.1 and 7.7 ms with leaf=layer and 12.2 and 13.2 ms with leaf=none. The time per
        # step is that of leaf=none.
        "layer": EngineHost(17, 21, 53),
    }

    def shards(self, cell: Cell) -> int:
        return cell.cluster.world_size

    def refusals(self, cell: Cell) -> list[str]:
        reasons = super().refusals(cell)
        if cell.dp_replicate > 1:
            reasons.append(
                f"engine={self.name} shards over all ranks and does not support"
                f" dp_replicate={cell.dp_replicate}; take dp_shard, or engine=fsdp2"
            )
        return reasons

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of weights, gradients, wide weights and moments, and of gathered weights.

        In bf16 a parameter has 2 bytes of weights, 2 of gradients, 4 of wide weights and 8 of AdamW moments.
        In fp32 there is a wide copy, too. A single rank gathers nothing, because its partition is the whole
        parameter. An optimizer in host memory leaves only the weights on a GPU. Between steps it keeps wide
        gradients, 4 bytes, in host memory, which counts on a CPU rank. Gradients are collected in a buffer of
        REDUCE_BUCKET elements and copied to be reduced (`reduce_scatter_coalesced`), in a layer's backward if
        the model has more elements, else after backward.
        """
        model, count, e = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype]
        shards, head_count = self.shards(cell), head_parameters(cell.model)
        kept_head = e * head_count if model.tied_embeddings else 0
        moments = OPTIMIZER_FACTS[cell.optimizer.name].moments
        states, update = 2 * e + (1 + moments) * FLOAT32_BYTES, e + FLOAT32_BYTES
        if cell.offload.optimizer:
            states, update = (e if cell.cluster.device == "cuda" else states + FLOAT32_BYTES), 0
        layers = e * _layers_kept(cell) * one_layer_parameters(model) if shards > 1 else 0
        gathered = e * head_count + layers if shards > 1 else 0
        reduced = e * min(count, REDUCE_BUCKET)
        return EngineMemory(
            states=states * count // shards + e * REDUCE_BUCKET,
            gathered=gathered,
            spare=layers,
            beyond=max(0, e * min(count, MAX_LIVE_PARAMETERS) - gathered) if shards > 1 else 0,
            kept_head_gradient=kept_head,
            layer_gradients=e * one_layer_parameters(model)
            + kept_head
            + (reduced if count - head_count > REDUCE_BUCKET else 0),  # the embedding's gradient comes last
            update=max(gathered + reduced + e * head_count, update * min(count // shards, MAX_SUB_GROUP)),
            loading=e * layer_parameters(model) // shards + FLOAT32_BYTES * (count - layer_parameters(model)),
        )

    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield the messages of each tensor, flat and padded (`Init._partition_param`), in the cell's dtype.

        Small tensors stay whole and are gathered one by one after the update (`_post_step`). The others are
        gathered in every micro-step, which also reduces all gradients, in buckets (`reduce_scatter_coalesced`
        and `reduce_independent_p_g_buckets_and_remove_grads`).
        """
        ranks, e = self.shards(cell), DTYPE_BYTES[cell.dtype]

        def shard(tensors: Iterable[TrainedTensor]) -> int:
            return e * sum(math.ceil(tensor.count / ranks) for tensor in tensors)

        gathered = [all_gather(shard([tensor]), ranks) for tensor in _tensors_to_gather(cell.model)]
        reduced = [reduce_scatter(shard(bucket), ranks) for bucket in _reduce_buckets(cell.model)]
        yield from (gathered + reduced) * cell.grad_accum
        whole = (tensor for tensor in trained_tensors(cell.model) if _stays_whole(tensor))
        yield from (all_gather(shard([tensor]), ranks) for tensor in whole)
        norm_bytes = FLOAT32_BYTES if cell.offload.optimizer else FLOAT64_BYTES
        for _ in range(_sub_groups(cell.model, ranks)):
            yield all_reduce(norm_bytes, ranks)


def _layers_kept(cell: Cell) -> int:
    """Return the number of layers that stay gathered from forward to backward, at least one.

    Between the two uses of a layer come forward and backward of all later layers, a second forward if they
    are checkpointed, and the head twice (`__params_to_release` in DeepSpeed's
    partitioned_param_coordinator.py).
    """
    passes = 3 if cell.checkpointing else 2
    room = MAX_REUSE_DISTANCE - 2 * head_parameters(cell.model)
    return min(cell.model.num_layers, max(1, -(-room // (passes * one_layer_parameters(cell.model)))))


def _stays_whole(tensor: TrainedTensor) -> bool:
    return tensor.count <= PERSISTENCE_THRESHOLD


def _tensors_to_gather(model: ModelConfig) -> list[TrainedTensor]:
    """Return an estimate of the tensors that a micro-step gathers, in forward and again in backward.

    Backward does not gather the output head again, nor the last layers that fit with it in
    `MAX_LIVE_PARAMETERS`. If all layers fit, it gathers nothing again. A replay of the coordinator of
    DeepSpeed 0.19 gathered up to 2 % less than this for models with 1.5 to 32 billion weights, and a third
    more for those with half a billion.
    """
    kept = (MAX_LIVE_PARAMETERS - head(model).count) // one_layer_parameters(model)
    again = model.num_layers - min(model.num_layers, max(0, kept))
    outer = (embedding(model), embedding(model), head(model)) if again else tensors_outside_layers(model)
    tensors = (*outer, *flatten_modules(layer_modules(model)) * (model.num_layers + again))
    return [tensor for tensor in tensors if not _stays_whole(tensor)]


def _reduce_buckets(model: ModelConfig) -> Iterator[list[TrainedTensor]]:
    """Yield the tensors of each bucket in the order of backward; a larger tensor has its own bucket."""
    bucket: list[TrainedTensor] = []
    for tensor in tensors_in_backward(model):
        if bucket and sum(part.count for part in (*bucket, tensor)) > REDUCE_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def _sub_groups(model: ModelConfig, ranks: int) -> int:
    """Return the number of sub-groups, which are updated one by one (`_create_fp16_sub_groups`).

    Every sub-group has its own norm.
    """
    groups, elements = 1, 0
    for tensor in trained_tensors(model)[:-1]:
        elements += math.ceil(tensor.count / ranks)
        if elements >= MAX_SUB_GROUP:
            groups, elements = groups + 1, 0
    return groups
