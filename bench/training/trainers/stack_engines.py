"""Setup of Accelerate for a cell, and `Engine` classes for the engines that training stacks build."""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bench.config import Cell
from bench.ranks.deepspeed import join_deepspeed
from bench.ranks.groups import RankGroups
from bench.training.engines.ddp.engine import DDP
from bench.training.engines.engine import Engine
from bench.training.engines.fsdp2.engine import FSDP2
from bench.training.engines.zero3.engine import Zero3, shard_parameters, zero3_config
from bench.training.optimizer import Updater
from bench.training.trainer_facts import STACK_KERNELS

MIXED_PRECISION: Mapping[str, str] = {"bf16": "bf16", "fp32": "no"}
OWN_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_TORCH_DEVICE")
"""Environment variables of Accelerate that this module sets, and removes before the next cell."""


def prepare_accelerate(cell: Cell) -> None:
    """Reset Accelerate's state of an earlier cell in this process, and configure Accelerate for this cell.

    Call this before the model is built.
    """
    from accelerate.state import AcceleratorState, GradientState
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # DeepSpeed wraps this function, and must not wrap its wrapper of an earlier cell.
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(STACK_KERNELS[cell.kernel], None)
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)
    engine = STACK_ENGINES[cell.engine.name]
    os.environ.update(engine.variables)
    if engine is StackZero3:
        join_deepspeed(cell)
    if cell.cluster.device == "cpu":
        set_cpu_process_group(cell.cluster.backend, engine.cpu_distributed_type)


def set_cpu_process_group(backend: str, distributed_type: str) -> None:
    """Set the process group of CPU ranks in Accelerate, which looks for one only on GPUs.

    Without this, Accelerate assumes one process and gives all ranks the same batches. With DeepSpeed's
    loader, training then silently repeats a sequence for each rank that shares it.
    `distributed_type` is the name of one of Accelerate's `DistributedType`.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # Without the variable, Accelerate changes the number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))

    def prepare_backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
        return backend, DistributedType[distributed_type]

    PartialState._prepare_backend = prepare_backend


def _deepspeed_ulysses(cell: Cell) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    kernel = STACK_KERNELS[cell.kernel]
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=kernel)
    return {"sp_backend": "deepspeed", "sp_size": cell.sp_degree, "sp_handler": handler}


def _torch_cp(cell: Cell) -> dict[str, Any]:
    from accelerate.utils import TorchContextParallelConfig

    from bench.strategies.torch_cp.attention import set_shard_layout, use_flash_operator_in_sdpa_on_cpu

    set_shard_layout(cell.layout)
    if cell.cluster.device == "cpu":
        use_flash_operator_in_sdpa_on_cpu()
    handler = TorchContextParallelConfig(cp_comm_strategy=cell.option("rotation"))
    return {"cp_backend": "torch", "cp_size": cell.sp_degree, "cp_handler": handler}


PARALLELISM: Mapping[str, Callable[[Cell], dict[str, Any]]] = {
    "deepspeed_ulysses": _deepspeed_ulysses,
    "torch_cp": _torch_cp,
}


def parallelism(cell: Cell) -> Any:
    """Return the ParallelismConfig that Accelerate's documentation recommends; None if `sp_degree` is 1."""
    from accelerate import ParallelismConfig

    if cell.sp_degree == 1:
        return None
    return ParallelismConfig(dp_shard_size=cell.dp_shard, **PARALLELISM[cell.strategy](cell))


class StackEngine(Engine):
    """Engine that a stack builds. It can be used after `attach`, which takes what the stack built."""

    prefix = "model"
    """Prefix of parameter names, which makes them equal to those in `ModelWithLoss`."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables that `accelerate launch` would set."""
    cpu_distributed_type: ClassVar[str] = "MULTI_GPU"
    """Accelerate's DistributedType for CPU ranks; it shards parameters only if this is a type of GPUs."""
    delays_sync: ClassVar[bool] = True
    """True if micro-steps before the last run in Accelerate's `no_sync`."""

    def __init__(self, cell: Cell, groups: RankGroups) -> None:
        self.cell, self.groups = cell, groups

    @staticmethod
    def plugin(cell: Cell) -> dict[str, Any]:  # noqa: ARG004
        """Return the arguments of Accelerate's Accelerator that choose the engine."""
        return {}

    @staticmethod
    @abstractmethod
    def arguments(cell: Cell) -> dict[str, Any]:
        """Return the arguments of transformers' TrainingArguments that choose the engine."""

    def place(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """Fill the model by taking all `layers`, and return it on the device where the stack expects it.

        This base class moves it to host memory layer by layer; FSDP2 shards a layer on the GPU later.
        """
        for layer in layers:
            layer.to("cpu")
        return model.to("cpu")

    def attach(self, model: Any, optimizer: Any, schedule: Any) -> None:
        """Set the prepared model, its unwrapped torch optimizer and the schedule of the learning rate."""
        self.module = model
        self.updater = Updater(getattr(model, "module", model), self.cell.optimizer, optimizer, schedule)

    @contextmanager
    def without_update(self) -> Iterator[None]:
        """Keep `backward` from updating the parameters in this context, so that gradients stay."""
        yield

    def reported_norm(self, clip_result: Any) -> Tensor:
        """Return the norm that gradients had before clipping; call this after the update.

        `clip_result` is the return value of the stack's clipping, which means nothing under DeepSpeed.
        """
        norm = clip_result.full_tensor() if hasattr(clip_result, "full_tensor") else clip_result
        return torch.as_tensor(norm)


class StackDDP(StackEngine, DDP):
    cpu_distributed_type = "MULTI_CPU"

    @staticmethod
    def arguments(cell: Cell) -> dict[str, Any]:  # noqa: ARG004
        return {"ddp_find_unused_parameters": False}

    def place(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:
        deque(layers, maxlen=0)  # takes all layers, which fills the model
        return model.to(device)


class StackFSDP2(StackEngine, FSDP2):
    variables: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

    @staticmethod
    def plugin(cell: Cell) -> dict[str, Any]:
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

    @staticmethod
    def arguments(cell: Cell) -> dict[str, Any]:  # noqa: ARG004
        return {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": False},
        }


class StackZero3(StackEngine, Zero3):
    """ZeRO-3 under Accelerate, whose own `backward` also updates the parameters at the end of a step."""

    variables: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_DEEPSPEED": "true"}
    delays_sync = False

    @staticmethod
    def plugin(cell: Cell) -> dict[str, Any]:
        from accelerate import DeepSpeedPlugin

        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero3_config(cell))}

    @staticmethod
    def arguments(cell: Cell) -> dict[str, Any]:
        return {"deepspeed": zero3_config(cell)}

    def place(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """Shard the model layer by layer, as `from_pretrained` does; no rank holds the whole model."""
        for part in itertools.chain(layers, [model]):
            shard_parameters(part, self.cell)
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
    def without_update(self) -> Iterator[None]:
        self.engine.step = lambda: None
        try:
            yield
        finally:
            del self.engine.step

    def reported_norm(self, clip_result: Any) -> Tensor:
        """Return the global gradient norm before clipping, which DeepSpeed caches in its step."""
        del clip_result
        return torch.as_tensor(self.engine.get_global_grad_norm())


STACK_ENGINES: Mapping[str, type[StackDDP | StackFSDP2 | StackZero3]] = {
    "ddp": StackDDP,
    "fsdp2": StackFSDP2,
    "zero3": StackZero3,
}


def bare_optimizer(wrapped: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside the wrappers of Accelerate and DeepSpeed."""
    optimizer: Any = wrapped.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
