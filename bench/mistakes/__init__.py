"""Known mistakes of sequence parallelism, made on purpose to see that each is found.

A new one is a line below and a class in `code.py`. May import training and all below; this file no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.config import RunConfig

if TYPE_CHECKING:
    from bench.mistakes.code import Mistake


@dataclass(frozen=True, slots=True)
class MistakeFacts:
    """One mistake, and the cells in which it changes anything."""

    meaning: str
    made_in: str
    """The strategy that `experiment=loss_equivalence` makes it in."""
    needs: Callable[[RunConfig], bool]
    way_out: str
    """What to choose where a cell is not of these."""


def _shares(cell: RunConfig) -> bool:
    return cell.strategy in ("ulysses", "ring", "usp") and cell.sp_degree > 1


def _is_unpacked_ring(cell: RunConfig) -> bool:
    """Tiles of packed documents are of many sizes: the own block's is not that of what arrived."""
    return cell.strategy in ("ring", "usp") and cell.ring_degree > 1 and not cell.data.packs


def _is_uneven(cell: RunConfig) -> bool:
    return _shares(cell) and cell.trainer == "native" and cell.data.prompt_tokens > 0


OURS = "it is made in strategy=ulysses, ring or usp, with sp_degree=2 or more"
MISTAKES: Mapping[str, MistakeFacts] = {
    "mean_of_rank_means": MistakeFacts(
        "each rank divides by its own number of valid tokens, and the ranks' gradients are averaged",
        "ulysses", _is_uneven, f"{OURS}, trainer=native, and data.prompt_tokens=1 or more",
    ),
    "mask_off_by_one": MistakeFacts(
        "every query sees the key after its own", "ulysses", _shares, OURS,
    ),
    "labels_shifted_in_shards": MistakeFacts(
        "labels are shifted after the sequence is cut, so that the last token of a shard has none",
        "ulysses", _shares, OURS,
    ),
    "gradients_divided_by_sp": MistakeFacts(
        "gradients are averaged over the ranks of a sequence as over sequences", "ulysses", _shares, OURS,
    ),
    "own_block_in_ring_backward": MistakeFacts(
        "backward computes with the rank's own keys where it should with those that arrived",
        "ring", _is_unpacked_ring,
        "it is made in strategy=ring or usp, with two ranks in a ring or more, and data.packing=none",
    ),
}  # fmt: skip
"""By name; `mistake=...` on the command line."""


def mistaken(name: str) -> Mistake:
    """How a mistake is made, imported only where ranks run; nothing is changed where there is none."""
    code = importlib.import_module("bench.mistakes.code")
    made: Mistake = code.CODE[name]
    return made
