"""Engine of torch's DistributedDataParallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.config import LOW_PRECISION
from bench.training.engines.engine import TorchEngine
from bench.training.loss import ModelWithLoss
from bench.training.models import TORCH_DTYPES
from bench.training.optimizer import Updater


class DDP(TorchEngine):
    """Data parallelism with the whole model on every rank; autocast gives matrix products low precision."""

    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        deque(layers, maxlen=0)  # takes all layers, which fills the model
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
        sync = self.module.no_sync() if distributed and not last else nullcontext()
        with sync, self.autocast:
            yield

    @property
    def shard_index(self) -> int:
        return 0


ENGINE = DDP
