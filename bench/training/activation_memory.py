"""What keeps activations small: inputs of checkpointed layers in host memory, and MLPs tile by tile.

Tiles are the idea of ALST's TiledMLP (arXiv:2506.13996, section 3.2), with its size of a tile. DeepSpeed's
own class runs autograd's backward inside of a backward, once a tile, and tells ZeRO's hooks which is the
last: DDP's hooks take the first for all. Tiles that are checkpointed come to the engine as one gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class ActivationOffload:
    """What the checkpoints of a model's layers keep goes to host memory, by torch's own `save_on_cpu`.

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


def tile_mlps(model: Any) -> None:
    """Let every layer's MLP work on as many rows at a time as the hidden size has numbers."""
    for layer in model.model.layers:
        layer.mlp.forward = partial(_tiled, layer.mlp.forward, model.config.hidden_size)


def _tiled(mlp: Callable[[Tensor], Tensor], rows: int, hidden_BSH: Tensor) -> Tensor:
    """The MLP's output [B, S, H]; backward computes each tile again, one at a time."""
    tiles = hidden_BSH.flatten(0, 1).split(rows)
    done = [checkpoint(mlp, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
    return torch.cat(done).view_as(hidden_BSH)
