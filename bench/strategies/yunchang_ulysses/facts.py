"""Facts of yunchang's `UlyssesAttention`, with an all-to-all for each of Q, K, V and the output."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ulysses.facts import PackagedUlyssesFacts


class YunchangUlyssesFacts(PackagedUlyssesFacts):
    name = "yunchang_ulysses"
    style = PlotStyle("#661100", (5, 1, 0))
    no_documents_reason = "yunchang's UlyssesAttention does not take document boundaries"
    package = "yunchang"
    flash_attn_kernels = (FLASH_ATTN, "flash_attn_3")
    tested_version = "0.6.4"
