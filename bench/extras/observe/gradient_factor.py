"""Factor between the sum of all ranks' gradients and the gradient that the optimizer uses.

It is 1 if gradients are added up over the ranks, and 1 / ranks if they are averaged. It is measured on one
parameter: a hook sees the gradient of this rank's backward, and the other gradient is read before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench.common.deferred_errors import DeferredErrors

CLIP = "_clip_grads_with_norm_"
"""Function of torch that scales gradients for all of its ways to clip by their norm."""
TOLERANCE = 0.02
"""Largest relative error of a measured factor, and of the gradient from this multiple of the sum."""
SURE_ERROR = 0.1
"""Relative error of the gradient that no rounding explains."""


class GradientFactor:
    """Watches the gradient of one trained parameter in one step.

    Attributes:
        is_multiple: False if the optimizer's gradient is no multiple of the ranks' sum; set by `measure`.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        whole = (item for item in trained if item.numel() > 1 and not isinstance(item, DTensor))
        self._parameter = min(whole, key=nn.Parameter.numel, default=None)
        self.is_multiple = True
        self._local: Tensor | None = None
        self._used: Tensor | None = None
        self._errors = DeferredErrors()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        self._local = self._used = None
        with ExitStack() as hooks:
            if self._parameter is not None:
                hooks.callback(self._parameter.register_hook(self._add_local).remove)
                hooks.callback(register_optimizer_step_pre_hook(self._read_used).remove)
                clip = getattr(clip_grad, CLIP)
                hooks.callback(setattr, clip_grad, CLIP, clip)
                setattr(clip_grad, CLIP, partial(self._read_and_clip, clip))
            yield
        self._errors.raise_first()

    def measure(self, sequence_ranks: int, device: torch.device) -> float | None:
        """Return the factor, or 1 / a number of ranks if near; None if unknown. Every rank must call this."""
        world, local, used = dist.get_world_size(), self._local, self._used
        is_known = local is not None and used is not None and local.shape == used.shape
        shapes: list[Any] = [None] * world
        dist.all_gather_object(shapes, tuple(local.shape) if is_known and local is not None else None)
        if len({*shapes}) > 1 or local is None or used is None or not is_known:
            return None
        total = local.to(device, copy=True)
        dist.all_reduce(total)
        used, total = used.double().flatten(), total.double().flatten().to(used.device)
        factor = float(used @ total) / (float(total @ total) or 1.0)
        rest = float((used - factor * total).norm() / used.norm())
        self.is_multiple = world == 1 or not rest > SURE_ERROR
        if not factor or not rest <= TOLERANCE:
            return None
        divisors = (world, sequence_ranks, world // sequence_ranks, 1)
        nearest = min((1 / divisor for divisor in divisors), key=lambda expected: abs(factor - expected))
        return nearest if abs(factor / nearest - 1) <= TOLERANCE else factor

    def _add_local(self, gradient: Tensor) -> None:
        with self._errors, torch.no_grad():
            local = gradient.detach().clone()
            self._local = local if self._local is None else self._local + local

    def _read_and_clip(self, clip: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._read_used()
        return clip(*args, **named)

    def _read_used(self, *_: Any) -> None:
        """Keep the gradient before the first clipping or, without clipping, before the optimizer's step."""
        with self._errors:
            gradient = None if self._parameter is None else self._parameter.grad
            if self._used is None and gradient is not None:
                self._used = gradient.detach().clone()
