"""One colour and marker per strategy, the same in every figure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """A strategy's colour and marker, the same in every figure."""

    color: str
    marker: str


# Okabe and Ito's colours, which colour-blind readers can tell apart; grey for their too pale yellow.
STRATEGY_LOOKS: Mapping[str, Look] = {
    "local": Look("#000000", "o"),
    "ulysses": Look("#0072B2", "s"),
    "ring": Look("#D55E00", "^"),
    "usp": Look("#009E73", "D"),
    "deepspeed_ulysses": Look("#56B4E9", "v"),
    "ring_flash_attn": Look("#E69F00", "P"),
    "ring_flash_attn_llama3": Look("#CC79A7", "p"),
    "torch_cp": Look("#7F7F7F", "h"),
}
# Tol's muted colours, apart from the ones above.
OTHER_COLORS = ("#882255", "#332288", "#999933", "#117733", "#AA4499", "#88CCEE")
OTHER_MARKERS = ("<", ">", "8", "d")


def looks_of(strategies: Iterable[str]) -> dict[str, Look]:
    """Each strategy's colour and marker, no two alike while there are colours left.

    One that is not in the table gets those its name leads to, whatever else is drawn; where two names lead
    to one colour, the later in the alphabet takes the next that is free.
    """
    names = sorted(set(strategies))
    looks = {name: STRATEGY_LOOKS[name] for name in names if name in STRATEGY_LOOKS}
    free = [*OTHER_COLORS]
    for name in (name for name in names if name not in STRATEGY_LOOKS):
        code = zlib.crc32(name.encode())
        wanted = code % len(OTHER_COLORS)
        turns = (OTHER_COLORS[(wanted + turn) % len(OTHER_COLORS)] for turn in range(len(OTHER_COLORS)))
        color = next(color for color in turns if color in free)
        free = [each for each in free if each != color] or [*OTHER_COLORS]
        looks[name] = Look(color, OTHER_MARKERS[code // len(OTHER_COLORS) % len(OTHER_MARKERS)])
    return looks
