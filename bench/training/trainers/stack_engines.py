"""Accelerate set up for a cell, and the engine that a stack has made of the model, as passes look at one."""

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
from bench.training.engines.zero3.engine import Zero3, keep_own_share, zero3_config
from bench.training.optimizer import Updater
from bench.training.trainer_facts import STACK_KERNELS

MIXED_PRECISION: Mapping[str, str] = {"bf16": "bf16", "fp32": "no"}
OWN_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_TORCH_DEVICE")


def prepare_accelerate(cell: Cell) -> None:
    """Forget the last cell of this process and tell Accelerate of the ranks, before anything is built."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # DeepSpeed puts its exchange around this function, and would around that of an earlier cell.
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(STACK_KERNELS[cell.kernel], None)
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)
    engine = STACK_ENGINES[cell.engine.name]
    os.environ.update(engine.variables)
    if engine is StackZero3:
        join_deepspeed(cell)
    if cell.cluster.device == "cpu":
        name_the_cpu_ranks(cell.cluster.backend, engine.cpu_ranks)


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


def _deepspeed_ulysses(cell: Cell) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    kernel = STACK_KERNELS[cell.kernel]
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=kernel)
    return {"sp_backend": "deepspeed", "sp_size": cell.sp_degree, "sp_handler": handler}


def _torch_cp(cell: Cell) -> dict[str, Any]:
    from accelerate.utils import TorchContextParallelConfig

    from bench.strategies.torch_cp.attention import deal_out_as, flash_in_torch_attention_for_cpu

    deal_out_as(cell.layout)
    if cell.cluster.device == "cpu":
        flash_in_torch_attention_for_cpu()
    handler = TorchContextParallelConfig(cp_comm_strategy=cell.option("rotation"))
    return {"cp_backend": "torch", "cp_size": cell.sp_degree, "cp_handler": handler}


PARALLELISM: Mapping[str, Callable[[Cell], dict[str, Any]]] = {
    "deepspeed_ulysses": _deepspeed_ulysses,
    "torch_cp": _torch_cp,
}


def parallelism(cell: Cell) -> Any:
    """Accelerate's ParallelismConfig as its documentation says; None where no ranks share a sequence."""
    from accelerate import ParallelismConfig

    if cell.sp_degree == 1:
        return None
    return ParallelismConfig(dp_shard_size=cell.dp_shard, **PARALLELISM[cell.strategy](cell))


class StackEngine(Engine):
    """An engine that a stack builds; `attach` takes the result."""

    prefix = "model"
    """In the native loop the model is a part of the module that computes the loss."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables that `accelerate launch` would set."""
    cpu_ranks: ClassVar[str] = "MULTI_GPU"
    """Accelerate's type of CPU ranks: it shards parameters only over what it takes for devices."""
    delays_sync: ClassVar[bool] = True
    """True where micro-steps before the last run in Accelerate's `no_sync`."""

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
    cpu_ranks = "MULTI_CPU"

    @staticmethod
    def arguments(cell: Cell) -> dict[str, Any]:  # noqa: ARG004
        return {"ddp_find_unused_parameters": False}

    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:
        deque(layers, maxlen=0)
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
    """Under Accelerate the engine's backward updates, too, at the end of a step."""

    variables: ClassVar[Mapping[str, str]] = {"ACCELERATE_USE_DEEPSPEED": "true"}
    delays_sync = False

    @staticmethod
    def plugin(cell: Cell) -> dict[str, Any]:
        from accelerate import DeepSpeedPlugin

        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero3_config(cell))}

    @staticmethod
    def arguments(cell: Cell) -> dict[str, Any]:
        return {"deepspeed": zero3_config(cell)}

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
