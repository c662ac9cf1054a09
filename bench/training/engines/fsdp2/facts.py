"""Facts of FSDP2, torch's `fully_shard`, with one parameter group per layer and one for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from bench.config import DTYPE_BYTES, NOT_USED, Cell
from bench.training.engines.facts import EngineFacts, EngineHost, EngineMemory
from bench.training.messages import Sent, all_gather, all_reduce, reduce_scatter
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.parameters import (
    TrainedTensor,
    flatten_modules,
    head_parameters,
    layer_modules,
    layer_parameters,
    mlp_output_parameters,
    one_layer_parameters,
    parameters,
    tensors_outside_layers,
    trained_tensors,
    wide_bytes,
)


class FSDP2Facts(EngineFacts):
    name = "fsdp2"
    dtypes = ("bf16", "fp32", "fp64")
    wrapper = "FSDPModule"
    # Scaled from 3.3 and 3.5 ms on the CPU rank that ZeRO-3's `layer` was timed on. The time per step was
    # measured with one layer on the H100 (cold, n=2).
    host: ClassVar[Mapping[str, EngineHost]] = {NOT_USED: EngineHost(7, 10, 18)}

    def shards(self, cell: Cell) -> int:
        return cell.sp_degree * cell.dp_shard

    def memory(self, cell: Cell) -> EngineMemory:
        """Return the bytes of sharded wide weights and moments, of gathered weights and of gradients.

        Gathered are the weights of the root for the whole step, of a layer, and in a layer's backward of the
        next one. With several micro-steps every rank keeps whole wide gradients until the last. Otherwise
        gradients are sharded layer by layer, and those of the previous layer are whole and wide until they
        are reduced. The gradients of the root come last, in addition to its weights.
        """
        model, count, e, wide = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype], wide_bytes(cell)
        layers, shards = layer_parameters(model), self.shards(cell)
        root, one_layer = count - layers, one_layer_parameters(model)
        kept_head = e * head_parameters(model) if model.tied_embeddings else 0
        waits, other_layers = cell.grad_accum > 1, layers - one_layer
        whole = wide * count if waits else 0
        return EngineMemory(
            states=(1 + OPTIMIZER_FACTS[cell.optimizer.name].moments) * wide * count // shards + whole,
            gathered=e * (root + one_layer),
            kept_head_gradient=kept_head,
            layer_gradients=(e + wide if other_layers else 0) * one_layer
            + e * mlp_output_parameters(model)
            + kept_head,
            arriving=0 if waits else wide * other_layers // shards,
            update=(0 if waits else wide * count // shards) + (2 * e + wide) * root,
            loading=wide * layers // shards + wide * root,
        )

    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield the messages of each layer, and of all other weights together.

        Forward and backward both gather a layer; the other weights stay gathered from forward to backward. A
        tensor is split along its first dimension and padded (`FSDPParam._init_sharded_param`). The last
        micro-step reduces gradients, in float32 at least, within the shards and then among replicas
        (`foreach_reduce`). The gradient norm comes from the norms of all tensors, which one all-reduce sums
        (`clip_grad_norm_`).
        """
        ranks = max(1, cell.cluster.world_size // cell.dp_replicate)  # an illegal cell has too many replicas
        model, e, wide = cell.model, DTYPE_BYTES[cell.dtype], wide_bytes(cell)

        def shard(tensors: Iterable[TrainedTensor]) -> int:
            return sum(math.ceil(tensor.rows / ranks) * tensor.columns for tensor in tensors)

        rest, layer = shard(tensors_outside_layers(model)), shard(flatten_modules(layer_modules(model)))
        for _ in range(cell.grad_accum):
            yield all_gather(rest * e, ranks)
            yield from [all_gather(layer * e, ranks)] * (2 * model.num_layers)
        for group in (rest, *[layer] * model.num_layers):
            yield reduce_scatter(group * wide, ranks)
            yield all_reduce(group * wide, cell.dp_replicate, stride=ranks)
        yield all_reduce(len(trained_tensors(model)) * wide, ranks)
