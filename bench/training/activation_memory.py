"""Two ways to save activation memory: layer inputs in host memory, and MLPs that are computed in tiles.

A tile is a part of the tokens. Tiles and their size follow ALST's TiledMLP (arXiv:2506.13996, section 3.2).
DeepSpeed's class of that name runs one autograd backward per tile, and tells only ZeRO which tile is the
last; DDP would reduce the gradient of the first tile as if it were complete. Here every tile is a checkpoint
of one autograd graph, so that each engine gets one complete gradient. Shapes: B sequences of S tokens, hidden
size H.
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
    """Mover of the inputs of checkpointed layers to host memory, by torch's `save_on_cpu`.

    Copies from a GPU go to pinned memory and run in the compute stream, so that no computation hides them. A
    CPU rank copies nothing, because torch returns the tensor itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.packed_bytes = 0
        """Bytes that were moved to host memory so far."""
        self._hooks = save_on_cpu(pin_memory=device.type == "cuda")

    def install(self, model: Any) -> None:
        """Move the inputs of all layers of a model that has checkpointing enabled."""
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = self._checkpoint_layer

    def _checkpoint_layer(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a layer in a checkpoint.

        Only its inputs are moved to host memory, because the checkpoint drops the tensors inside of it.
        """
        with saved_tensors_hooks(self._pack, self._hooks.unpack_hook):
            return checkpoint(function, *inputs, use_reentrant=False)

    def _pack(self, tensor: Tensor) -> Any:
        self.packed_bytes += tensor.nbytes
        return self._hooks.pack_hook(tensor)


def tile_mlps(model: Any) -> None:
    """Make the MLP of every layer compute in tiles; the number of tokens of a tile is the hidden size."""
    for layer in model.model.layers:
        layer.mlp.forward = partial(_run_in_tiles, layer.mlp.forward, model.config.hidden_size)


def _run_in_tiles(mlp: Callable[[Tensor], Tensor], tile_tokens: int, hidden_BSH: Tensor) -> Tensor:
    """Return the output [B, S, H] of an MLP; backward recomputes the tiles, one at a time."""
    tiles = hidden_BSH.flatten(0, 1).split(tile_tokens)
    outputs = [checkpoint(mlp, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
    return torch.cat(outputs).view_as(hidden_BSH)
