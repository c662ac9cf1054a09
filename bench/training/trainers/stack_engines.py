"""Accelerate set up for a cell, and the engine that a stack has made of the model, as passes look at one."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.config import RunConfig
from bench.ranks.deepspeed import join_deepspeed
from bench.ranks.groups import RankGroups
from bench.training.engines import DDP, FSDP2, Engine, Zero3, keep_own_share, zero3_config
from bench.training.optimizer import Updater
from bench.training.trainer_facts import STACK_KERNELS

MIXED_PRECISION: Mapping[str, str] = {"bf16": "bf16", "fp32": "no"}
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true"},
}
"""By engine, what `accelerate launch` would set."""
OWN_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_TORCH_DEVICE")


def prepare_accelerate(cell: RunConfig) -> None:
    """Forget the last cell of this process and tell Accelerate of the ranks, before anything is built."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # DeepSpeed puts its exchange around this function, and would around that of an earlier cell.
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(STACK_KERNELS[cell.kernel], None)
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT[cell.engine.name])
    if cell.engine.name == "zero3":
        join_deepspeed(cell)
    if cell.cluster.device == "cpu":
        # It shards parameters only over what it takes for devices.
        name_the_cpu_ranks(cell.cluster.backend, "MULTI_CPU" if cell.engine.name == "ddp" else "MULTI_GPU")


def name_the_cpu_ranks(backend: str, kind: str) -> None:
    """Tell Accelerate which process group exists; it looks for one only where there is a GPU.

    Without, it takes each CPU rank for the only one. It then deals every rank the same batches, of which
    DeepSpeed's loader trains one after another: each sequence as often as ranks share it, without a word.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # else it sets another number

    def found(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return backend, DistributedType[kind]

    PartialState._prepare_backend = found


def _deepspeed_ulysses(cell: RunConfig) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    kernel = STACK_KERNELS[cell.kernel]
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=kernel)
    return {"sp_backend": "deepspeed", "sp_size": cell.sp_degree, "sp_handler": handler}


def _torch_cp(cell: RunConfig) -> dict[str, Any]:
    from accelerate.utils import TorchContextParallelConfig

    from bench.strategies.torch_cp.attention import deal_out_as, flash_in_torch_attention_for_cpu

    deal_out_as(cell.layout)
    if cell.cluster.device == "cpu":
        flash_in_torch_attention_for_cpu()
    handler = TorchContextParallelConfig(cp_comm_strategy=cell.option("rotation"))
    return {"cp_backend": "torch", "cp_size": cell.sp_degree, "cp_handler": handler}


PARALLELISM: Mapping[str, Callable[[RunConfig], dict[str, Any]]] = {
    "deepspeed_ulysses": _deepspeed_ulysses,
    "torch_cp": _torch_cp,
}


def parallelism(cell: RunConfig) -> Any:
    """Accelerate's ParallelismConfig as its documentation says; None where no ranks share a sequence."""
    from accelerate import ParallelismConfig

    if cell.sp_degree == 1:
        return None
    return ParallelismConfig(dp_shard_size=cell.dp_shard, **PARALLELISM[cell.strategy](cell))


def _zero3(cell: RunConfig) -> dict[str, Any]:
    from accelerate import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero3_config(cell))}


def _fsdp2(cell: RunConfig) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cell.dtype == "bf16" else None
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=precision,
        )
    }


ENGINE_PLUGINS: Mapping[str, Callable[[RunConfig], dict[str, Any]]] = {
    "ddp": lambda _: {},
    "fsdp2": _fsdp2,
    "zero3": _zero3,
}
"""By engine, its plugin by the name of Accelerator's parameter."""


class StackEngine(Engine):
    """An engine that a stack builds; `attach` tells what it has built."""

    prefix = "model"
    """In the native loop the model is a part of the module that computes the loss."""

    def __init__(self, cell: RunConfig, groups: RankGroups) -> None:
        self.cell, self.groups = cell, groups

    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """The model for the stack, each of `layers` with its numbers when it is taken.

        In host memory, layer by layer: FSDP2 takes each to the GPU when it shards it.
        """
        for layer in layers:
            layer.to("cpu")
        return model.to("cpu")

    def attach(self, model: Any, optimizer: Any, schedule: Any) -> None:
        """The prepared model, torch's optimizer below whatever wraps it, and what sets its learning rate."""
        self.module = model
        self.updater = Updater(getattr(model, "module", model), self.cell.optimizer, optimizer, schedule)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around backward passes whose gradients are to stay: nothing is updated while it lasts."""
        yield

    def reported_norm(self, clipped: Any) -> Tensor:
        """The gradient's norm before clipping, after an update; `clipped` is what clipping returned."""
        whole = clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped
        return torch.as_tensor(whole)


class StackDDP(StackEngine, DDP):
    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:
        deque(layers, maxlen=0)
        return model.to(device)


class StackFSDP2(StackEngine, FSDP2):
    """As FSDP2, once it is attached."""


class StackZero3(StackEngine, Zero3):
    """Under Accelerate the engine's backward updates, too, at the end of a step."""

    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """Sharded layer by layer, as `from_pretrained` loads a model under ZeRO-3; no rank holds it whole."""
        for part in itertools.chain(layers, [model]):
            keep_own_share(part, self.cell)
        return model

    def attach(self, model: Any, optimizer: Any, schedule: Any) -> None:
        del optimizer
        self.engine = self.module = model
        self.schedule = schedule

    def update(self) -> Tensor:
        norm = super().update()
        self.schedule.step()
        return norm

    @contextmanager
    def held(self) -> Iterator[None]:
        self.engine.step = lambda: None
        try:
            yield
        finally:
            del self.engine.step

    def reported_norm(self, clipped: Any) -> Tensor:
        """DeepSpeed clips where it updates, so that it knows the norm only then."""
        del clipped
        return torch.as_tensor(self.engine.get_global_grad_norm())


STACK_ENGINES: Mapping[str, type[StackDDP | StackFSDP2 | StackZero3]] = {
    "ddp": StackDDP,
    "fsdp2": StackFSDP2,
    "zero3": StackZero3,
}


def bare_optimizer(wrapped: Any) -> torch.optim.Optimizer:
    """The optimizer of torch below Accelerate's wrapper and DeepSpeed's."""
    found: Any = wrapped.optimizer
    while not isinstance(found, torch.optim.Optimizer):
        found = found.optimizer
    return found
