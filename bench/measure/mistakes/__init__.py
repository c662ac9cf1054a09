"""Known mistakes of sequence parallelism, to see that each is found. May import what lies below measure.

The one table of mistakes: a new one is a line below and a class in `code.py`. This file imports no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.config import Cell

if TYPE_CHECKING:
    from bench.measure.mistakes.code import Mistake


@dataclass(frozen=True, slots=True)
class MistakeFacts:
    """One mistake, and the cells in which it changes anything."""

    made_in: str
    """The strategy that `experiment=loss_equivalence` makes it in."""
    needs: Callable[[Cell], bool]


def _shares(cell: Cell) -> bool:
    return cell.strategy in ("ulysses", "ring", "usp") and cell.sp_degree > 1


def _is_unpacked_ring(cell: Cell) -> bool:
    """Tiles of packed documents are of many sizes: the own block's is not that of what arrived."""
    return cell.strategy in ("ring", "usp") and cell.ring_degree > 1 and not cell.data.packs


def _is_uneven(cell: Cell) -> bool:
    return _shares(cell) and cell.trainer == "native" and cell.data.prompt_tokens > 0


MISTAKES: Mapping[str, MistakeFacts] = {
    "mean_of_rank_means": MistakeFacts("ulysses", _is_uneven),
    "mask_off_by_one": MistakeFacts("ulysses", _shares),
    "labels_shifted_in_shards": MistakeFacts("ulysses", _shares),
    "gradients_divided_by_sp": MistakeFacts("ulysses", _shares),
    "own_block_in_ring_backward": MistakeFacts("ring", _is_unpacked_ring),
}
"""The mistakes by name; `experiment=loss_equivalence` makes each (docs/loss_equivalence.md)."""


def mistaken(name: str) -> Mistake:
    """How a mistake is made, imported only where ranks run; nothing is changed where there is none."""
    code = importlib.import_module("bench.measure.mistakes.code")
    made: Mistake = code.CODE[name]
    return made
