"""Table of known mistakes of sequence parallelism, injected to see that the checks find them.

May import what lies below measure. A new mistake is a line in `MISTAKES` and a class in `code.py`. No torch.
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
    """Facts of one known mistake."""

    strategy: str
    """Strategy into which `experiment=loss_equivalence` injects the mistake."""
    applies_to: Callable[[Cell], bool]
    """Function that returns whether the mistake changes the result of a cell."""


def _shares_sequences(cell: Cell) -> bool:
    return cell.strategy in ("ulysses", "ring", "usp") and cell.sp_degree > 1


def _is_unpacked_ring(cell: Cell) -> bool:
    """Return whether all blocks of a ring have the same size, which is not so with packed documents.

    Only then can the local block replace a received one.
    """
    return cell.strategy in ("ring", "usp") and cell.ring_degree > 1 and not cell.data.packs


def _has_uneven_labels(cell: Cell) -> bool:
    return _shares_sequences(cell) and cell.trainer == "native" and cell.data.prompt_tokens > 0


MISTAKES: Mapping[str, MistakeFacts] = {
    "mean_of_rank_means": MistakeFacts("ulysses", _has_uneven_labels),
    "mask_off_by_one": MistakeFacts("ulysses", _shares_sequences),
    "labels_shifted_in_shards": MistakeFacts("ulysses", _shares_sequences),
    "gradients_divided_by_sp": MistakeFacts("ulysses", _shares_sequences),
    "own_block_in_ring_backward": MistakeFacts("ring", _is_unpacked_ring),
}
"""Facts of the known mistakes by name (docs/loss_equivalence.md)."""


def load_mistake(name: str) -> Mistake:
    """Return the code of a mistake, imported only in rank processes. The mistake `none` changes nothing."""
    code = importlib.import_module("bench.measure.mistakes.code")
    mistake: Mistake = code.MISTAKE_CODE[name]
    return mistake
