"""Each MLP tile by tile along the sequence, so that its wide activations are never there for all tokens.

The idea is ALST's TiledMLP (arXiv:2506.13996, section 3.2), with its size of a tile. DeepSpeed's own class
runs autograd's backward inside of a backward, once a tile, and tells ZeRO's hooks which is the last: DDP's
hooks take the first for all. Tiles that are checkpointed come to the engine as one gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def tile_mlps(model: Any) -> None:
    """Let every layer's MLP work on as many rows at a time as the hidden size has numbers."""
    for layer in model.model.layers:
        layer.mlp.forward = partial(_tiled, layer.mlp.forward, model.config.hidden_size)


def _tiled(mlp: Callable[[Tensor], Tensor], rows: int, hidden_BSH: Tensor) -> Tensor:
    """The MLP's output [B, S, H]; backward computes each tile again, one at a time."""
    tiles = hidden_BSH.flatten(0, 1).split(rows)
    done = [checkpoint(mlp, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles]
    return torch.cat(done).view_as(hidden_BSH)
