"""ringmaster's ring attention, unchanged, on flash-attn or on a stand-in that calls the cell's kernel."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from bench.strategies.ringmaster_ring.facts import ALLGATHER, BALANCED, P2P, ROTATION
from bench.strategies.ringmaster_ulysses.attention import TRANSFORMERS_NAMES, Attention, Ringmaster

ROTATIONS: Mapping[str, str] = {ALLGATHER: "ALLGATHER", P2P: "ALLTOALL"}
"""Names of rotations in the package; its balanced rings ignore the argument."""
PROVIDER = "hf_kernels"
"""Package's name of the provider that takes flash-attn's functions from transformers."""


class RingmasterRingAttention(Ringmaster):
    backend = "RING"

    def load_balance(self) -> str:
        rotation = self.cell.option(ROTATION)
        return rotation if rotation in BALANCED else "none"

    def make_function(self) -> Attention:
        from ringmaster import RotateMethod

        rotation, name = self.cell.option(ROTATION), self.backend.lower()
        make = getattr(importlib.import_module(f"ringmaster.strategies.{name}"), f"make_{name}_attention")
        method = RotateMethod[ROTATIONS.get(rotation, "ALLGATHER")]
        function: Attention = make(PROVIDER, implementation_name(rotation, self.kernel.name), method)
        return function


def implementation_name(rotation: str, kernel: str) -> str:
    """Return the kernel's name, by which the package caches functions; its rings accept only one name."""
    if rotation != ALLGATHER:
        return "flash_attention_2"
    return TRANSFORMERS_NAMES.get(kernel, f"bench/{kernel}")


STRATEGY = RingmasterRingAttention
