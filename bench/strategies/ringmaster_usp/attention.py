"""ringmaster's USP, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from bench.strategies.ringmaster_ring.attention import PROVIDER, ROTATIONS, implementation
from bench.strategies.ringmaster_ulysses.attention import Attention, Ringmaster


class RingmasterUSPAttention(Ringmaster):
    backend = "USP"

    def function_of_package(self) -> Attention:
        from ringmaster import RotateMethod
        from ringmaster.strategies.usp import make_usp_attention

        rotation = self.cell.option("rotation")
        function: Attention = make_usp_attention(
            PROVIDER, implementation(rotation, self.kernel.name), RotateMethod[ROTATIONS[rotation]]
        )
        return function


STRATEGY = RingmasterUSPAttention
