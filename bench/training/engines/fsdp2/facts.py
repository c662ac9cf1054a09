"""Facts of FSDP2, torch's `fully_shard`, with one parameter group per layer and one for all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from bench.config import DTYPE_BYTES, NOT_USED, Cell
from bench.training.engines.facts import EngineFacts, EngineHost, EngineMemory
from bench.training.messages import EngineMessage, all_gather, all_reduce, reduce_scatter
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
    state_dtype_bytes,
    tensors_outside_layers,
    trained_tensors,
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
        """Return the bytes of sharded weights and optimizer state, of gathered weights and of gradients.

        Sharded weights, optimizer state and reduced gradients are in float32 at least ("wide"); gathered
        weights are in the cell's dtype. The weights outside the layers (the root) stay gathered for the whole
        step, and those of a layer while it computes. Backward also gathers the next layer ahead. With several
        micro-steps every rank keeps whole wide gradients until the last one. Otherwise each layer's gradients
        are sharded after its backward; until then those of the previous layer are whole and wide. The root's
        gradients come last, while its weights are still gathered.
        """
        model, count = cell.model, parameters(cell.model)
        dtype_bytes, state_bytes = DTYPE_BYTES[cell.dtype], state_dtype_bytes(cell)
        layers, shards = layer_parameters(model), self.shards(cell)
        root, one_layer = count - layers, one_layer_parameters(model)
        kept_head = dtype_bytes * head_parameters(model) if model.tied_embeddings else 0
        keeps_whole, other_layers = cell.grad_accum > 1, layers - one_layer
        whole_gradients = state_bytes * count if keeps_whole else 0
        return EngineMemory(
            states=(1 + OPTIMIZER_FACTS[cell.optimizer.name].moments) * state_bytes * count // shards
            + whole_gradients,
            gathered=dtype_bytes * (root + one_layer),
            kept_head_gradient=kept_head,
            layer_gradients=(dtype_bytes + state_bytes if other_layers else 0) * one_layer
            + dtype_bytes * mlp_output_parameters(model)
            + kept_head,
            arriving=0 if keeps_whole else state_bytes * other_layers // shards,
            update=(0 if keeps_whole else state_bytes * count // shards)
            + (2 * dtype_bytes + state_bytes) * root,
            loading=state_bytes * layers // shards + state_bytes * root,
        )

    def messages(self, cell: Cell) -> Iterator[EngineMessage]:
        """Yield the collectives of one rank in one optimizer step.

        Each layer is sharded by itself; all weights outside the layers form the root. Forward and backward
        both gather a layer; the root stays gathered from forward to backward. A tensor is split along its
        first dimension and padded (`FSDPParam._init_sharded_param`). The last micro-step reduces gradients,
        in float32 at least, with a reduce-scatter over the shards and an all-reduce over the replicas
        (`foreach_reduce`). One all-reduce of the norms of all tensors gives the gradient norm
        (`clip_grad_norm_`).
        """
        ranks = max(1, cell.cluster.world_size // cell.dp_replicate)  # an illegal cell has too many replicas
        model, dtype_bytes, state_bytes = cell.model, DTYPE_BYTES[cell.dtype], state_dtype_bytes(cell)

        def shard_size(tensors: Iterable[TrainedTensor]) -> int:
            return sum(math.ceil(tensor.rows / ranks) * tensor.columns for tensor in tensors)

        root = shard_size(tensors_outside_layers(model))
        layer = shard_size(flatten_modules(layer_modules(model)))
        for _ in range(cell.grad_accum):
            yield all_gather(root * dtype_bytes, ranks)
            yield from [all_gather(layer * dtype_bytes, ranks)] * (2 * model.num_layers)
        for group in (root, *[layer] * model.num_layers):
            yield reduce_scatter(group * state_bytes, ranks)
            yield all_reduce(group * state_bytes, cell.dp_replicate, stride=ranks)
        yield all_reduce(len(trained_tensors(model)) * state_bytes, ranks)
