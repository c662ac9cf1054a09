"""yunchang's `UlyssesAttention`: four all-to-alls a pass, of Q, K, V and the output."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import NOT_ASKED
from bench.strategies.schedule import Schedule
from bench.strategies.ulysses.facts import Ulysses, tensor_by_tensor


class YunchangUlysses(Ulysses):
    name = "yunchang_ulysses"
    ours = "ulysses"
    takes_fewer_kv_heads = False
    packs = False
    packing_is = NOT_ASKED
    why_it_packs_not = "yunchang's UlyssesAttention takes no boundaries of documents"
    package = "yunchang"
    calls_flash_attn = True
    tried = "0.6.4"

    def schedule(self, cell: RunConfig) -> Schedule:
        """The bytes of `ulysses`, each tensor by itself."""
        return tensor_by_tensor(cell)
