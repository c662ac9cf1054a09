"""FSDP2: torch's fully_shard, one group per layer and one for the rest."""

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
    ends,
    head_parameters,
    in_modules,
    layer_modules,
    layer_parameters,
    mlp_output_parameters,
    one_layer_parameters,
    parameters,
    trained_tensors,
    wide_bytes,
)


class FSDP2Facts(EngineFacts):
    name = "fsdp2"
    dtypes = ("bf16", "fp32", "fp64")
    wrapper = "FSDPModule"
    # On the CPU rank that ZeRO-3's `layer` was timed on, 3.3 and 3.5 ms. The time of a step is that of one
    # layer on the H100 (cold, n=2).
    host: ClassVar[Mapping[str, EngineHost]] = {NOT_USED: EngineHost(7, 10, 18)}

    def shards(self, cell: Cell) -> int:
        return cell.sp_degree * cell.dp_shard

    def memory(self, cell: Cell) -> EngineMemory:
        """Return wide weights and Adam's two, sharded; gathered are a layer, and the root's for the step.

        In a layer's backward the next one is gathered, too. Where micro-steps follow one another, whole wide
        gradients wait on each rank for the last. Otherwise they arrive layer by layer, sharded; those of the
        layer before are held wide and whole to be reduced. The root's come last, in addition to its weights.
        """
        model, count, e, wide = cell.model, parameters(cell.model), DTYPE_BYTES[cell.dtype], wide_bytes(cell)
        layers, shards = layer_parameters(model), self.shards(cell)
        root, one_layer = count - layers, one_layer_parameters(model)
        kept_head = e * head_parameters(model) if model.tied_embeddings else 0
        waits, others = cell.grad_accum > 1, layers - one_layer
        whole = wide * count if waits else 0
        return EngineMemory(
            states=(1 + OPTIMIZER_FACTS[cell.optimizer.name].moments) * wide * count // shards + whole,
            gathered=e * (root + one_layer),
            kept_head_gradient=kept_head,
            layer_gradients=(e + wide if others else 0) * one_layer
            + e * mlp_output_parameters(model)
            + kept_head,
            arriving=0 if waits else wide * others // shards,
            update=(0 if waits else wide * count // shards) + (2 * e + wide) * root,
            loading=wide * layers // shards + wide * root,
        )

    def messages(self, cell: Cell) -> Iterator[Sent]:
        """Yield the messages of each layer, and of all other weights as one; both passes gather them.

        The rest stays gathered from forward to backward. Each tensor is split along its first dimension, and
        padded (`FSDPParam._init_sharded_param`). Gradients are reduced in the last micro-step, in float32 at
        least, and then among replicas (`foreach_reduce`). The gradient's norm is that of all tensors' norms,
        which are reduced together (`clip_grad_norm_`).
        """
        ranks = max(1, cell.cluster.world_size // cell.dp_replicate)  # an illegal cell has too many replicas
        model, e, wide = cell.model, DTYPE_BYTES[cell.dtype], wide_bytes(cell)

        def shard(tensors: Iterable[TrainedTensor]) -> int:
            return sum(math.ceil(tensor.rows / ranks) * tensor.columns for tensor in tensors)

        rest, layer = shard(ends(model)), shard(in_modules(layer_modules(model)))
        for _ in range(cell.grad_accum):
            yield all_gather(rest * e, ranks)
            yield from [all_gather(layer * e, ranks)] * (2 * model.num_layers)
        for group in (rest, *[layer] * model.num_layers):
            yield reduce_scatter(group * wide, ranks)
            yield all_reduce(group * wide, cell.dp_replicate, stride=ranks)
        yield all_reduce(len(trained_tensors(model)) * wide, ranks)
