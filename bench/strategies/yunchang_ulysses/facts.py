"""yunchang's `UlyssesAttention`: four all-to-alls a pass, of Q, K, V and the output."""

from __future__ import annotations

from bench.strategies.plot_style import PlotStyle
from bench.strategies.ulysses.facts import PackagedUlyssesFacts


class YunchangUlyssesFacts(PackagedUlyssesFacts):
    name = "yunchang_ulysses"
    style = PlotStyle("#661100", (5, 1, 0))
    why_it_packs_not = "yunchang's UlyssesAttention takes no boundaries of documents"
    package = "yunchang"
    tried = "0.6.4"
