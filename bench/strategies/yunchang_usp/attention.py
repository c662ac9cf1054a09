"""yunchang's `LongContextAttention`, unchanged, on flash-attn or a stand-in that calls the cell's kernel."""

from __future__ import annotations

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.yunchang_ring.attention import RINGS
from bench.strategies.yunchang_ulysses.attention import YunchangUlyssesAttention


class YunchangUSPAttention(YunchangUlyssesAttention):
    def load_package(self) -> None:
        package, groups = package_on("yunchang", self.kernel), self.groups
        # The package's `set_seq_parallel_pg` would create groups with a shorter timeout than ours.
        process_groups = package.globals.PROCESS_GROUP
        process_groups.ULYSSES_PG, process_groups.RING_PG = groups.ulysses, groups.ring
        self.package_attention = package.LongContextAttention(ring_impl_type=RINGS[self.cell.layout])


STRATEGY = YunchangUSPAttention
