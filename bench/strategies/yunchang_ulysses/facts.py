"""Facts of yunchang's `UlyssesAttention`, with an all-to-all for each of Q, K, V and the output."""

from __future__ import annotations

from bench.strategies.plot_style import PlotStyle
from bench.strategies.ulysses.facts import PackagedUlyssesFacts


class YunchangUlyssesFacts(PackagedUlyssesFacts):
    name = "yunchang_ulysses"
    style = PlotStyle("#661100", (5, 1, 0))
    no_documents_reason = "yunchang's UlyssesAttention does not take document boundaries"
    package = "yunchang"
    tested_version = "0.6.4"
