"""How parameters, gradients and optimizer state are sharded: one class per engine, one table.

To every engine sequence ranks are plain data-parallel ranks: it averages gradients over all of them.
Mixed precision is each engine's own: bf16 compute over float32 parameters and optimizer state. In a bf16 cell
DeepSpeed reduces gradients in bf16, its default, DDP and our FSDP2 in float32: engines differ in bytes.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bench.config import DTYPE_BYTES, LOW_PRECISION, RunConfig
from bench.ranks.groups import RankGroups
from bench.training.loss import ModelWithLoss
from bench.training.models import FAMILIES, TORCH_DTYPES
from bench.training.optimizer import Updater, make_optimizer, make_schedule

OFFLOADED_GRADIENT_BYTES = 4
"""Of a number in host memory: DeepSpeed's gradients there are float32."""


class Engine(ABC):
    """A model wrapped for training. One micro-step is `forward` and `backward`; `update` ends the step."""

    module: nn.Module
    prefix: ClassVar[str] = ""
    """What the names of the wrapped model's parameters are to begin with."""
    weights_in_dtype: ClassVar[bool] = True
    """Whether forward reads weights of the cell's dtype; if not, autocast rounds float32 ones."""

    def __init__(
        self,
        model: ModelWithLoss,
        layers: Iterable[nn.Module],
        cell: RunConfig,
        groups: RankGroups,
        device: torch.device,
    ) -> None:
        """Each of `layers` has its numbers when it is taken, and the rest of the model when all are."""
        self.cell, self.groups = cell, groups
        self.wrap(model, layers, device)

    @abstractmethod
    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Set `module`, the model as it is trained."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around forward and backward; gradients are reduced in the last micro-step of a step."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def update(self) -> Tensor:
        """Clip, step and clear; the gradient norm before clipping, as a scalar tensor."""

    @abstractmethod
    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and whole averaged gradient, after the last backward and before `update`.

        One at a time, because those of a large model need not fit together; every rank must take them all.
        """

    @abstractmethod
    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and what this rank's optimizer updates of it, which may be nothing."""

    @abstractmethod
    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and what the optimizer keeps of its shard under this key, if anything."""

    @property
    @abstractmethod
    def shard_index(self) -> int:
        """Which shard that is: ranks with the same hold replicas of one another."""

    def offloaded_bytes(self) -> int | None:
        """What a step has to copy between the device and an optimizer in host memory; None without one.

        Gradients one way and weights the other; what an engine copies beside these is not counted.
        """
        return None


class TorchEngine(Engine):
    """One of torch's own, which leaves clipping and the optimizer's step to its user."""

    updater: Updater

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Tensor:
        return _whole(self.updater.update())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        gradients = [(name, p.grad) for name, p in self._named()]
        yield from ((name, _whole(grad)) for name, grad in gradients if grad is not None)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, _own(p.detach())) for name, p in self._named())

    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        state = self.updater.optimizer.state
        yield from ((name, _own(state[p][key])) for name, p in self._named() if key in state.get(p, ()))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.updater.model.named_parameters(self.prefix)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class DDP(TorchEngine):
    """Every rank holds everything; low precision by autocast."""

    weights_in_dtype = False

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        deque(layers, maxlen=0)
        self.model = model.to(device)
        self.module: Any = self.model
        if self.groups.world_size > 1:
            self.module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.updater = Updater(self.model, self.cell.optimizer)
        dtype = self.cell.dtype
        self.autocast = torch.autocast(device.type, TORCH_DTYPES[dtype], enabled=dtype in LOW_PRECISION)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        distributed = isinstance(self.module, DistributedDataParallel)
        held_back = self.module.no_sync() if distributed and not last else nullcontext()
        with held_back, self.autocast:
            yield

    @property
    def shard_index(self) -> int:
        return 0


class FSDP2(TorchEngine):
    """torch's fully_shard, one group per layer and one for the rest."""

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:  # noqa: ARG002  that of the mesh
        keywords: dict[str, Any] = {"mesh": self.groups.shard_mesh}
        if self.cell.dtype in LOW_PRECISION:
            keywords["mp_policy"] = MixedPrecisionPolicy(TORCH_DTYPES[self.cell.dtype], torch.float32)
        for layer in layers:
            fully_shard(layer, **keywords)
        self.module: Any = fully_shard(model, **keywords)
        self.updater = Updater(model, self.cell.optimizer)

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    @property
    def shard_index(self) -> int:
        return self.groups.shard_mesh.get_local_rank("shard")


class Zero3(Engine):
    """DeepSpeed ZeRO-3; its own loop clips inside `step`."""

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:  # noqa: ARG002  DeepSpeed's own
        import deepspeed

        from bench.ranks.deepspeed import join_deepspeed

        join_deepspeed(self.cell)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        for part in itertools.chain(layers, [model]):
            keep_own_share(part, self.cell)
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
        # Our loss already counts the tokens of all micro-steps: nothing more to divide by.
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(self) -> Tensor:
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self._named():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_local_fp32_param

        for name, parameter in self._named():
            yield name, safe_get_local_fp32_param(parameter)

    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_local_optimizer_state

        for name, parameter in self._named():
            state = None
            if parameter.requires_grad:
                with suppress(KeyError):  # without an update: DeepSpeed makes none of gradients that overflow
                    state = safe_get_local_optimizer_state(parameter, key)
            if state is not None:
                yield name, state

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        found: Iterator[tuple[str, nn.Parameter]] = self.engine.module.named_parameters(self.prefix)
        return found

    @property
    def shard_index(self) -> int:
        return self.groups.rank  # ZeRO-3 shards over all ranks

    def offloaded_bytes(self) -> int | None:
        if not self.cell.offload.optimizer:
            return None
        numbers = sum(shard.numel() for _, shard in self.shards())
        return numbers * (OFFLOADED_GRADIENT_BYTES + DTYPE_BYTES[self.cell.dtype])


ENGINES: Mapping[str, type[Engine]] = {"ddp": DDP, "fsdp2": FSDP2, "zero3": Zero3}


def keep_own_share(part: nn.Module, cell: RunConfig) -> None:
    """Leave of each parameter that ZeRO-3 does not have yet only this rank's share, in the cell's dtype."""
    import deepspeed
    from deepspeed.utils import groups

    for parameter in part.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(TORCH_DTYPES[cell.dtype])
    # Not the default group: gathers of parameters would wait there for what strategies exchange.
    gathering = groups._get_sequence_data_parallel_group()
    deepspeed.zero.Init(part, data_parallel_group=gathering, config_dict_or_path=zero3_config(cell))


def zero3_config(cell: RunConfig) -> dict[str, Any]:
    """Return DeepSpeed's settings; whatever they leave out, such as bucket sizes, keeps its default."""
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
