"""Engine of DeepSpeed ZeRO-3."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.config import DTYPE_BYTES, Cell
from bench.training.engines.engine import Engine
from bench.training.loss import ModelWithLoss
from bench.training.models import FAMILIES, TORCH_DTYPES
from bench.training.optimizer import make_optimizer, make_schedule

OFFLOADED_GRADIENT_BYTES = 4
"""Bytes of a gradient element in host memory, where DeepSpeed keeps gradients in float32."""


class Zero3(Engine):
    """Sharding by DeepSpeed ZeRO-3, whose `step` also clips gradients."""

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:  # noqa: ARG002  DeepSpeed chooses it
        """Shard the decoder layers one by one, then the rest of the model, and start DeepSpeed's engine.

        The order is essential. Taking a layer from `layers` fills it, and it is sharded before the next is
        taken, so that a rank never holds the whole model. The rest is filled after the last layer.
        """
        import deepspeed

        from bench.ranks.deepspeed import join_deepspeed

        join_deepspeed(self.cell)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        for part in itertools.chain(layers, [model]):
            shard_parameters(part, self.cell)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(model, self.cell.optimizer),
            lr_scheduler=partial(make_schedule, config=self.cell.optimizer),
            config=zero3_config(self.cell),
        )
        self.module = self.engine

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is already divided by the tokens of all micro-steps.
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(self) -> Tensor:
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self._parameters():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_local_fp32_param

        for name, parameter in self._parameters():
            yield name, safe_get_local_fp32_param(parameter)

    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_local_optimizer_state

        for name, parameter in self._parameters():
            state = None
            if parameter.requires_grad:
                with suppress(KeyError):  # no state before the first update; DeepSpeed skips one on overflow
                    state = safe_get_local_optimizer_state(parameter, key)
            if state is not None:
                yield name, state

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        parameters: Iterator[tuple[str, nn.Parameter]] = self.engine.module.named_parameters(self.prefix)
        return parameters

    @property
    def shard_index(self) -> int:
        return self.groups.rank  # ZeRO-3 shards over all ranks

    def offloaded_bytes(self) -> int | None:
        if not self.cell.offload.optimizer:
            return None
        elements = sum(shard.numel() for _, shard in self.shards())
        return elements * (OFFLOADED_GRADIENT_BYTES + DTYPE_BYTES[self.cell.dtype])


def shard_parameters(part: nn.Module, cell: Cell) -> None:
    """Cast the parameters of a module to the cell's dtype and keep only this rank's shard of each.

    Parameters that ZeRO-3 has already sharded are left as they are.
    """
    import deepspeed
    from deepspeed.utils import groups

    for parameter in part.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(TORCH_DTYPES[cell.dtype])
    # The separate group keeps gathers of parameters from waiting for attention communication.
    group = groups._get_sequence_data_parallel_group()
    deepspeed.zero.Init(part, data_parallel_group=group, config_dict_or_path=zero3_config(cell))


def zero3_config(cell: Cell) -> dict[str, Any]:
    """Return DeepSpeed's configuration; settings that it lacks, such as bucket sizes, keep their defaults."""
    offload = {"device": "cpu", "pin_memory": cell.cluster.device == "cuda"}
    _, model_class = FAMILIES[cell.model.family]
    layers = {"leaf_module": {"classes": sorted(model_class._no_split_modules)}}
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "gradient_accumulation_steps": cell.grad_accum,
        "gradient_clipping": cell.optimizer.max_grad_norm,
        "bf16": {"enabled": cell.dtype == "bf16"},
        "fp16": {"enabled": cell.dtype == "fp16"},
        "zero_optimization": {
            "stage": 3,
            **(layers if cell.engine.leaf == "layer" else {}),
            **({"offload_optimizer": offload} if cell.offload.optimizer else {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


ENGINE = Zero3
