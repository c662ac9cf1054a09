"""What an engine holds of parameters, gradients and optimizer state, and when.

Written for the formulas as in `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.config import DTYPE_BYTES, RunConfig
from bench.cost.weights import (
    FLOAT32_BYTES,
    head_parameters,
    is_autocast,
    layer_parameters,
    mlp_output_parameters,
    one_layer_parameters,
    parameters,
    wide_bytes,
)

OPTIMIZER_MOMENTS: Mapping[str, int] = {"adamw": 2, "sgd": 1}
"""Numbers that an optimizer keeps of each parameter: running means of gradients, and of their squares."""
MAX_REUSE_DISTANCE = 1_000_000_000
"""Of ZeRO-3: `stage3_max_reuse_distance`, DeepSpeed's default. A weight stays gathered where fewer parameters
are used before it is used again: so do those of the last layers, from forward to backward."""
MAX_LIVE_PARAMETERS = 1_000_000_000
"""Of ZeRO-3: `stage3_max_live_parameters`, DeepSpeed's default: no more is fetched ahead."""
REDUCE_BUCKET = 500_000_000
"""Numbers of the buffer in which ZeRO-3 collects gradients before it reduces them: `reduce_bucket_size`,
DeepSpeed's default. It is allocated once, whatever the model's size (`stage3.py`, `ipg_buckets`)."""
PERSISTENCE_THRESHOLD = 100_000
"""Numbers of the largest tensor that ZeRO-3 keeps whole on every rank: `stage3_param_persistence_threshold`,
DeepSpeed's default."""
MAX_SUB_GROUP = 1_000_000_000
"""Of ZeRO-3: `sub_group_size`, DeepSpeed's default: parameters that are updated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine adds to one rank."""

    states: int
    """With gradients, where these are there before backward begins."""
    gathered: int
    spare: int = 0
    """Of these, what such an engine can do without."""
    beyond: int = 0
    """What there would be beyond these at the engine's own limit."""
    kept_head_gradient: int
    """One whole gradient of the output head where it waits for the embedding's, to which the head is tied."""
    layer_gradients: int
    """Whole gradients in a layer's backward: its own, and a tied head's."""
    arriving: int = 0
    """Gradients of all other layers, there by the last layer's backward and not before the first's."""
    update: int = 0
    loading: int


def _zero3(cell: RunConfig) -> EngineMemory:
    """In bf16: 2 of weights, 2 of gradients, 4 of their wide copy, 8 of Adam; in fp32 the copy is one more.

    One rank alone gathers nothing: its partition is the parameter. An optimizer in host memory leaves the
    weights on a GPU; there it keeps gradients wide, 4, between steps, which shows on a CPU. Gradients are
    collected in a buffer of REDUCE_BUCKET numbers and copied to be reduced (`reduce_scatter_coalesced`): in a
    layer's backward where the model has more, else once backward has ended.
    """
    model, count, e = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype]
    shards, head = cell.cluster.world_size, head_parameters(cell.model)
    kept_head = e * head if model.tied_embeddings else 0
    states, update = 2 * e + (1 + OPTIMIZER_MOMENTS[cell.optimizer.name]) * FLOAT32_BYTES, e + FLOAT32_BYTES
    if cell.offload.optimizer:
        states, update = (e if cell.cluster.device == "cuda" else states + FLOAT32_BYTES), 0
    layers = e * _layers_kept(cell) * one_layer_parameters(model) if shards > 1 else 0
    gathered = e * head + layers if shards > 1 else 0
    reduced = e * min(count, REDUCE_BUCKET)
    return EngineMemory(
        states=states * count // shards + e * REDUCE_BUCKET,
        gathered=gathered,
        spare=layers,
        beyond=max(0, e * min(count, MAX_LIVE_PARAMETERS) - gathered) if shards > 1 else 0,
        kept_head_gradient=kept_head,
        layer_gradients=e * one_layer_parameters(model)
        + kept_head
        + (reduced if count - head > REDUCE_BUCKET else 0),  # the embedding's gradient comes last
        update=max(gathered + reduced + e * head, update * min(count // shards, MAX_SUB_GROUP)),
        loading=e * layer_parameters(model) // shards + FLOAT32_BYTES * (count - layer_parameters(model)),
    )


def _layers_kept(cell: RunConfig) -> int:
    """How many layers ZeRO-3 holds gathered from forward to backward, at least the one at hand.

    Between both come the layers after it, forward and backward, computed again where checkpointed, and the
    head, twice: `__params_to_release` in DeepSpeed's partitioned_param_coordinator.py.
    """
    passes = 3 if cell.checkpointing else 2
    room = MAX_REUSE_DISTANCE - 2 * head_parameters(cell.model)
    return min(cell.model.num_layers, max(1, -(-room // (passes * one_layer_parameters(cell.model)))))


def _fsdp2(cell: RunConfig) -> EngineMemory:
    """Wide weights and Adam's two, sharded; gathered are a layer, and the root's for the step.

    In a layer's backward the next one is gathered, too. Where micro-steps follow one another, whole wide
    gradients wait on each rank for the last. Otherwise they arrive layer by layer, sharded; those of the
    layer before are held wide and whole to be reduced. The root's come last, beside its weights.
    """
    model, count, e, wide = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype], wide_bytes(cell)
    layers, shards = layer_parameters(model), cell.sp_degree * cell.dp_shard
    root, one_layer = count - layers, one_layer_parameters(model)
    kept_head = e * head_parameters(model) if model.tied_embeddings else 0
    waits, others = cell.grad_accum > 1, layers - one_layer
    whole = wide * count if waits else 0
    return EngineMemory(
        states=(1 + OPTIMIZER_MOMENTS[cell.optimizer.name]) * wide * count // shards + whole,
        gathered=e * (root + one_layer),
        kept_head_gradient=kept_head,
        layer_gradients=(e + wide if others else 0) * one_layer
        + e * mlp_output_parameters(model)
        + kept_head,
        arriving=0 if waits else wide * others // shards,
        update=(0 if waits else wide * count // shards) + (2 * e + wide) * root,
        loading=wide * layers // shards + wide * root,
    )


def _ddp(cell: RunConfig) -> EngineMemory:
    """Everything on every rank; autocast keeps a low-precision copy of each weight for the step."""
    count, e, wide = parameters(cell.model), DTYPE_BYTES[cell.dtype], wide_bytes(cell)
    kept_head = wide * head_parameters(cell.model) if cell.model.tied_embeddings else 0
    return EngineMemory(
        states=(2 + OPTIMIZER_MOMENTS[cell.optimizer.name]) * wide * count,
        gathered=e * count if is_autocast(cell) else 0,
        kept_head_gradient=kept_head,
        layer_gradients=e * one_layer_parameters(cell.model) + kept_head,
        loading=wide * count,
    )


ENGINE_MEMORY: Mapping[str, Callable[[RunConfig], EngineMemory]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero3": _zero3,
}
