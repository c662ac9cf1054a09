"""Facts of ZeRO-3, with which DeepSpeed shards parameters, gradients and optimizer state over all ranks.

Constants are DeepSpeed's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from bench.config import DTYPE_BYTES, NOT_USED, Cell, ModelConfig
from bench.training.engines.facts import EngineFacts, EngineHost, EngineMemory
from bench.training.messages import EngineMessage, all_gather, all_reduce, reduce_scatter
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
"""Default of `stage3_max_reuse_distance`. A weight stays gathered if fewer parameters than this are used
before it is used again. The weights of the last layers therefore stay gathered from forward to backward."""
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
    shards_over_all_ranks = True
    has_leaf = True
    recomputes_last_product = True  # deepspeed/runtime/zero/linear.py, LinearFunctionForZeroStage3
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

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of weights, gradients, master weights and moments, and of gathered weights.

        In bf16 a parameter has 2 bytes of weight, 2 of gradient, 4 of float32 master weight and 8 of AdamW
        moments. In fp32 DeepSpeed also keeps master weights. A single rank gathers nothing, because its shard
        is the whole parameter. With the optimizer in host memory only the weights stay on a GPU. It then
        keeps float32 gradients (4 bytes) in host memory, which is the only memory of a CPU rank.
        Gradients are collected in a buffer of REDUCE_BUCKET elements, which is copied to be reduced
        (`reduce_scatter_coalesced`). The copy is made during backward if the model has more elements than the
        buffer, and after backward if not.
        """
        model, count, dtype_bytes = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype]
        shards, head_count = self.shards(cell), head_parameters(cell.model)
        kept_head = dtype_bytes * head_count if model.tied_embeddings else 0
        moments = OPTIMIZER_FACTS[cell.optimizer.name].moments
        # Bytes per parameter.
        states, update = 2 * dtype_bytes + (1 + moments) * FLOAT32_BYTES, dtype_bytes + FLOAT32_BYTES
        if cell.offload.optimizer:
            states, update = (dtype_bytes if cell.cluster.device == "cuda" else states + FLOAT32_BYTES), 0
        kept_layers = dtype_bytes * _layers_kept(cell) * one_layer_parameters(model) if shards > 1 else 0
        gathered = dtype_bytes * head_count + kept_layers if shards > 1 else 0
        reduced = dtype_bytes * min(count, REDUCE_BUCKET)
        return EngineMemory(
            states=states * count // shards + dtype_bytes * REDUCE_BUCKET,
            gathered=gathered,
            spare=kept_layers,
            beyond=max(0, dtype_bytes * min(count, MAX_LIVE_PARAMETERS) - gathered) if shards > 1 else 0,
            kept_head_gradient=kept_head,
            layer_gradients=dtype_bytes * one_layer_parameters(model)
            + kept_head
            + (reduced if count - head_count > REDUCE_BUCKET else 0),  # the embedding's gradient comes last
            update=max(
                gathered + reduced + dtype_bytes * head_count, update * min(count // shards, MAX_SUB_GROUP)
            ),
            loading=dtype_bytes * layer_parameters(model) // shards
            + FLOAT32_BYTES * (count - layer_parameters(model)),
        )

    def messages(self, cell: Cell) -> Iterator[EngineMessage]:
        """Yield the collectives of every tensor and of the norms; tensors are sent in the cell's dtype.

        A tensor is flattened, padded and split (`Init._partition_param`). Every micro-step gathers large
        tensors one by one, and reduces all gradients in buckets (`reduce_scatter_coalesced`,
        `reduce_independent_p_g_buckets_and_remove_grads`). Small tensors stay whole on every rank and are
        gathered one by one after the update (`_post_step`).
        """
        ranks, dtype_bytes = self.shards(cell), DTYPE_BYTES[cell.dtype]

        def shard_bytes(tensors: Iterable[TrainedTensor]) -> int:
            return dtype_bytes * sum(math.ceil(tensor.count / ranks) for tensor in tensors)

        gathered = [all_gather(shard_bytes([tensor]), ranks) for tensor in _tensors_to_gather(cell.model)]
        reduced = [reduce_scatter(shard_bytes(bucket), ranks) for bucket in _reduce_buckets(cell.model)]
        yield from (gathered + reduced) * cell.grad_accum
        whole = (tensor for tensor in trained_tensors(cell.model) if _stays_whole(tensor))
        yield from (all_gather(shard_bytes([tensor]), ranks) for tensor in whole)
        norm_bytes = FLOAT32_BYTES if cell.offload.optimizer else FLOAT64_BYTES
        for _ in range(_sub_groups(cell.model, ranks)):
            yield all_reduce(norm_bytes, ranks)


def _layers_kept(cell: Cell) -> int:
    """Return the number of layers that stay gathered from forward to backward, at least one.

    Between the two uses of a layer, DeepSpeed uses every later layer in forward and backward (and in a second
    forward if layers are checkpointed), and the head twice. A layer stays if these are fewer parameters than
    MAX_REUSE_DISTANCE (`__params_to_release` in DeepSpeed's partitioned_param_coordinator.py).
    """
    uses = 3 if cell.checkpointing else 2
    room = MAX_REUSE_DISTANCE - 2 * head_parameters(cell.model)
    return min(cell.model.num_layers, max(1, -(-room // (uses * one_layer_parameters(cell.model)))))


def _stays_whole(tensor: TrainedTensor) -> bool:
    """Return whether every rank keeps the whole tensor, because it is small."""
    return tensor.count <= PERSISTENCE_THRESHOLD


def _tensors_to_gather(model: ModelConfig) -> list[TrainedTensor]:
    """Return an estimate of the tensors that a micro-step gathers, in forward and again in backward.

    Backward does not gather the output head again, nor the last layers that fit into MAX_LIVE_PARAMETERS with
    it. If all layers fit, it gathers nothing again. A replay of DeepSpeed 0.19's coordinator gathered at
    most 2 % less than this for models with 1.5 to 32 billion weights, and a third more for models with half a
    billion.
    """
    kept = (MAX_LIVE_PARAMETERS - head(model).count) // one_layer_parameters(model)
    again = model.num_layers - min(model.num_layers, max(0, kept))
    outer = (embedding(model), embedding(model), head(model)) if again else tensors_outside_layers(model)
    tensors = (*outer, *flatten_modules(layer_modules(model)) * (model.num_layers + again))
    return [tensor for tensor in tensors if not _stays_whole(tensor)]


def _reduce_buckets(model: ModelConfig) -> Iterator[list[TrainedTensor]]:
    """Yield the tensors of each bucket in the order of backward; one above REDUCE_BUCKET has its own."""
    bucket: list[TrainedTensor] = []
    for tensor in tensors_in_backward(model):
        if bucket and sum(part.count for part in (*bucket, tensor)) > REDUCE_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def _sub_groups(model: ModelConfig, ranks: int) -> int:
    """Return the number of sub-groups of tensors. They are updated one by one, and each has its own norm.

    See DeepSpeed's `_create_fp16_sub_groups`.
    """
    groups, elements = 1, 0
    for tensor in trained_tensors(model)[:-1]:
        elements += math.ceil(tensor.count / ranks)
        if elements >= MAX_SUB_GROUP:
            groups, elements = groups + 1, 0
    return groups
