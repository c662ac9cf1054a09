"""yunchang's `LongContextAttention`, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.yunchang_ring.attention import RINGS
from bench.strategies.yunchang_ulysses.attention import YunchangUlyssesAttention


class YunchangUSPAttention(YunchangUlyssesAttention):
    def load_package(self) -> None:
        package, groups = package_on("yunchang", self.kernel), self.groups
        # What its `set_seq_parallel_pg` sets, but groups of the harness: they outwait its deadline.
        chosen = package.globals.PROCESS_GROUP
        chosen.ULYSSES_PG, chosen.RING_PG = groups.ulysses, groups.ring
        self.package_attention = package.LongContextAttention(ring_impl_type=RINGS[self.cell.layout])


STRATEGY = YunchangUSPAttention
