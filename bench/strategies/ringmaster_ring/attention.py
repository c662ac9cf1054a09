"""ringmaster's ring attention, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from bench.strategies.ringmaster_ring.facts import ALLGATHER, BALANCED, P2P, ROTATION
from bench.strategies.ringmaster_ulysses.attention import IN_TRANSFORMERS, Attention, Ringmaster

ROTATIONS: Mapping[str, str] = {ALLGATHER: "ALLGATHER", P2P: "ALLTOALL"}
"""The package's own words; its balanced rings read none of them."""
PROVIDER = "hf_kernels"
"""Its way to flash-attn's functions, which it asks transformers for."""


class RingmasterRingAttention(Ringmaster):
    backend = "RING"

    def load_balance(self) -> str:
        rotation = self.cell.option(ROTATION)
        return rotation if rotation in BALANCED else "none"

    def function_of_package(self) -> Attention:
        from ringmaster import RotateMethod

        rotation, name = self.cell.option(ROTATION), self.backend.lower()
        make = getattr(importlib.import_module(f"ringmaster.strategies.{name}"), f"make_{name}_attention")
        method = RotateMethod[ROTATIONS.get(rotation, "ALLGATHER")]
        function: Attention = make(PROVIDER, implementation(rotation, self.kernel.name), method)
        return function


def implementation(rotation: str, kernel: str) -> str:
    """What the package calls the kernel, and remembers its functions by; it passes keys with one only."""
    if rotation != ALLGATHER:
        return "flash_attention_2"
    return IN_TRANSFORMERS.get(kernel, f"bench/{kernel}")


STRATEGY = RingmasterRingAttention
