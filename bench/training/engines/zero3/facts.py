"""ZeRO-3: DeepSpeed shards parameters, gradients and optimizer state over all ranks, with its defaults."""

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
    ends,
    head,
    head_parameters,
    in_backward,
    in_modules,
    layer_modules,
    layer_parameters,
    one_layer_parameters,
    parameters,
    trained_tensors,
)

MAX_REUSE_DISTANCE = 1_000_000_000
"""`stage3_max_reuse_distance`, DeepSpeed's default. A weight stays gathered where fewer parameters are used
before it is used again: so do those of the last layers, from forward to backward."""
MAX_LIVE_PARAMETERS = 1_000_000_000
"""`stage3_max_live_parameters`, DeepSpeed's default: no more is fetched ahead."""
REDUCE_BUCKET = 500_000_000
"""Numbers of the buffer in which gradients are collected before they are reduced: `reduce_bucket_size`,
DeepSpeed's default. It is allocated once, whatever the model's size (`stage3.py`, `ipg_buckets`)."""
PERSISTENCE_THRESHOLD = 100_000
"""Numbers of the largest tensor that is kept whole on every rank: `stage3_param_persistence_threshold`,
DeepSpeed's default."""
MAX_SUB_GROUP = 1_000_000_000
"""`sub_group_size`, DeepSpeed's default: parameters that are updated at once."""
FLOAT64_BYTES = 8


class Zero3Facts(EngineFacts):
    name = "zero3"
    dtypes = ("bf16", "fp32")
    package = "deepspeed"
    offloads_optimizer = True
    has_leaf = True
    copies_in_update = True
    host: ClassVar[Mapping[str, EngineHost]] = {
        # One H100, one rank (results/reference/h100): slope and intercept of steps of 1 and 28 layers, less
        # 8 us for each operator. Gradients were reduced in smaller buckets than DeepSpeed's default, with
        # which a CPU rank took a fifth less.
        NOT_USED: EngineHost(25, 36, 53),
        # One CPU rank, 14 layers of width 320, less the same model without an engine: 8.1 and 7.7 ms where
        # leaf=none took 12.2 and 13.2, and so that share of the H100's. The time of a step is that of
        # leaf=none.
        "layer": EngineHost(17, 21, 53),
    }

    def shards(self, cell: Cell) -> int:
        return cell.cluster.world_size

    def refusals(self, cell: Cell) -> list[str]:
        reasons = super().refusals(cell)
        if cell.dp_replicate > 1:
            reasons.append(
                f"dp_replicate={cell.dp_replicate} is not for engine={self.name}, which shards over all"
                " ranks; take dp_shard, or engine=fsdp2"
            )
        return reasons

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of weights, gradients, their wide copy and Adam's two: in bf16 2, 2, 4 and 8.

        In fp32 the wide copy is one more. One rank alone gathers nothing: its partition is the parameter. An
        optimizer in host memory leaves the weights on a GPU; there it keeps gradients wide, 4, between steps,
        which shows on a CPU. Gradients are collected in a buffer of REDUCE_BUCKET numbers and copied to be
        reduced (`reduce_scatter_coalesced`): in a layer's backward where the model has more, else once
        backward has ended.
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

        Small ones stay whole and are gathered one by one after the update (`_post_step`), the others in every
        micro-step. So are all gradients reduced, in buckets (`reduce_scatter_coalesced` and
        `reduce_independent_p_g_buckets_and_remove_grads`).
        """
        ranks, e = self.shards(cell), DTYPE_BYTES[cell.dtype]

        def shard(tensors: Iterable[TrainedTensor]) -> int:
            return e * sum(math.ceil(tensor.count / ranks) for tensor in tensors)

        gathered = [all_gather(shard([tensor]), ranks) for tensor in _gathered(cell.model)]
        reduced = [reduce_scatter(shard(bucket), ranks) for bucket in _reduced_together(cell.model)]
        yield from (gathered + reduced) * cell.grad_accum
        whole = (tensor for tensor in trained_tensors(cell.model) if _stays_whole(tensor))
        yield from (all_gather(shard([tensor]), ranks) for tensor in whole)
        norm_bytes = FLOAT32_BYTES if cell.offload.optimizer else FLOAT64_BYTES
        for _ in range(_updated_apart(cell.model, ranks)):
            yield all_reduce(norm_bytes, ranks)


def _layers_kept(cell: Cell) -> int:
    """Return how many layers are held gathered from forward to backward, at least the one at hand.

    Between both come the layers after it, forward and backward, computed again where checkpointed, and the
    head, twice: `__params_to_release` in DeepSpeed's partitioned_param_coordinator.py.
    """
    passes = 3 if cell.checkpointing else 2
    room = MAX_REUSE_DISTANCE - 2 * head_parameters(cell.model)
    return min(cell.model.num_layers, max(1, -(-room // (passes * one_layer_parameters(cell.model)))))


def _stays_whole(tensor: TrainedTensor) -> bool:
    return tensor.count <= PERSISTENCE_THRESHOLD


def _gathered(model: ModelConfig) -> list[TrainedTensor]:
    """Return the tensors that a micro-step gathers, an estimate: those of backward unless they are kept.

    The output head is kept, and as many of the last layers as fit next to it into `MAX_LIVE_PARAMETERS`;
    where all layers fit, so does everything. A replay of DeepSpeed 0.19's coordinator gathered up to 2 % less
    of models from 1.5 to 32 billion weights, and a third more of those with half a billion.
    """
    kept = (MAX_LIVE_PARAMETERS - head(model).count) // one_layer_parameters(model)
    again = model.num_layers - min(model.num_layers, max(0, kept))
    outer = (embedding(model), embedding(model), head(model)) if again else ends(model)
    tensors = (*outer, *in_modules(layer_modules(model)) * (model.num_layers + again))
    return [tensor for tensor in tensors if not _stays_whole(tensor)]


def _reduced_together(model: ModelConfig) -> Iterator[list[TrainedTensor]]:
    """Yield tensors in the order of backward, as many as a bucket has room for, and each that is larger."""
    bucket: list[TrainedTensor] = []
    for tensor in in_backward(model):
        if bucket and sum(each.count for each in (*bucket, tensor)) > REDUCE_BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def _updated_apart(model: ModelConfig, ranks: int) -> int:
    """Return how many groups of tensors are updated apart, each with a norm (`_create_fp16_sub_groups`)."""
    groups, held = 1, 0
    for tensor in trained_tensors(model)[:-1]:
        held += math.ceil(tensor.count / ranks)
        if held >= MAX_SUB_GROUP:
            groups, held = groups + 1, 0
    return groups
