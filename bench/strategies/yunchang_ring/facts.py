"""Facts of yunchang's rings, which descend from ring-flash-attn's and send the same bytes."""

from __future__ import annotations

from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring_flash_attn.facts import RingFlashAttnFacts


class YunchangRingFacts(RingFlashAttnFacts):
    name = "yunchang_ring"
    style = PlotStyle("#661100", (6, 1, 0), "--")
    package = "yunchang"
    tested_version = "0.6.4"
