"""ringmaster's ring attention, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.strategies.ringmaster_ulysses.attention import IN_TRANSFORMERS, Attention, Ringmaster

ROTATIONS: Mapping[str, str] = {"allgather": "ALLGATHER", "p2p": "ALLTOALL"}
"""The package's own words."""
PROVIDER = "hf_kernels"
"""Its way to flash-attn's functions, which it asks transformers for."""


class RingmasterRingAttention(Ringmaster):
    def runtime_of_package(self) -> Any:
        from ringmaster import Backend, CPRuntime, RingmasterConfig

        degree = self.cell.sp_degree
        config = RingmasterConfig(degree, Backend.RING, ulysses_size=1, ring_size=degree)
        return CPRuntime(config, ring_group=self.groups.sequence, cp_group=self.groups.sequence)

    def function_of_package(self) -> Attention:
        from ringmaster import RotateMethod
        from ringmaster.strategies.ring import make_ring_attention

        rotation = self.cell.option("rotation")
        function: Attention = make_ring_attention(
            PROVIDER, implementation(rotation, self.kernel.name), RotateMethod[ROTATIONS[rotation]]
        )
        return function


def implementation(rotation: str, kernel: str) -> str:
    """What the package calls the kernel, and remembers its functions by; it passes keys with one only."""
    return "flash_attention_2" if rotation == "p2p" else IN_TRANSFORMERS.get(kernel, f"bench/{kernel}")


STRATEGY = RingmasterRingAttention
