"""Checkpointed inputs of layers in host memory, by torch's own `save_on_cpu`; counts the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class ActivationOffload:
    """What the checkpoints of a model's layers keep goes to host memory, and comes back in backward.

    On a GPU the copies are pinned and in the stream that computes; no other stream hides them. On a CPU there
    is one memory: torch hands back the tensor itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.packed_bytes = 0
        """Bytes handed to host memory so far."""
        self._shipped = save_on_cpu(pin_memory=device.type == "cuda")

    def install(self, model: Any) -> None:
        """On every layer of a model whose checkpointing is on."""
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = self._checkpointed

    def _checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """A layer's checkpoint; what is saved inside is dropped by hooks of its own, so only inputs go."""
        with saved_tensors_hooks(self._pack, self._shipped.unpack_hook):
            return checkpoint(function, *inputs, use_reentrant=False)

    def _pack(self, tensor: Tensor) -> Any:
        self.packed_bytes += tensor.nbytes
        return self._shipped.pack_hook(tensor)
