"""Engine of FSDP2, torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.config import LOW_PRECISION
from bench.training.engines.engine import TorchEngine
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES
from bench.training.optimizer import Updater


class FSDP2(TorchEngine):
    """Sharding by `fully_shard`, with one parameter group per layer and one for all other parameters."""

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:  # noqa: ARG002  the mesh has the device
        keywords: dict[str, Any] = {"mesh": self.groups.shard_mesh}
        if self.cell.dtype in LOW_PRECISION:
            keywords["mp_policy"] = MixedPrecisionPolicy(TORCH_DTYPES[self.cell.dtype], torch.float32)
        for layer in layers:  # taking a layer fills it; it is sharded before the next is taken
            fully_shard(layer, **keywords)
        self.module: Any = fully_shard(model, **keywords)
        self.updater = Updater(model, self.cell.optimizer)

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    @property
    def shard_index(self) -> int:
        return self.groups.shard_mesh.get_local_rank("shard")


ENGINE = FSDP2
