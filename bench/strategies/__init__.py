"""Table of strategies, which split attention over ranks. May import ranks, attention and all below.

A new strategy is a folder here, a line of the table and a YAML in conf/strategy/, or a separate package with
an entry point (docs/your_strategy.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bench.strategies.deepspeed_fpdt.facts import DeepSpeedFPDTFacts
from bench.strategies.deepspeed_ulysses.facts import DeepSpeedUlyssesFacts
from bench.strategies.distflash_attn.facts import DistFlashAttnFacts
from bench.strategies.gather_kv.facts import GatherKVFacts
from bench.strategies.local.facts import LocalFacts
from bench.strategies.ring.facts import RingFacts
from bench.strategies.ring_flash_attn.facts import RingFlashAttnFacts
from bench.strategies.ring_flash_attn_llama3.facts import RingFlashAttnLlama3Facts
from bench.strategies.ring_self_attention.facts import RingSelfAttentionFacts
from bench.strategies.ringmaster_ring.facts import RingmasterRingFacts
from bench.strategies.ringmaster_ulysses.facts import RingmasterUlyssesFacts
from bench.strategies.ringmaster_usp.facts import RingmasterUSPFacts
from bench.strategies.table import StrategyTable
from bench.strategies.torch_cp.facts import TorchCPFacts
from bench.strategies.ulysses.facts import UlyssesFacts
from bench.strategies.ulysses_chunked.facts import UlyssesChunkedFacts
from bench.strategies.usp.facts import USPFacts
from bench.strategies.yunchang_ring.facts import YunchangRingFacts
from bench.strategies.yunchang_ulysses.facts import YunchangUlyssesFacts
from bench.strategies.yunchang_usp.facts import YunchangUSPFacts

if TYPE_CHECKING:
    from bench.strategies.strategy import Strategy

STRATEGIES = StrategyTable(
    (
        LocalFacts(),
        UlyssesFacts(),
        RingFacts(),
        USPFacts(),
        UlyssesChunkedFacts(),
        GatherKVFacts(),
        RingSelfAttentionFacts(),
        DistFlashAttnFacts(),
        DeepSpeedUlyssesFacts(),
        DeepSpeedFPDTFacts(),
        RingFlashAttnFacts(),
        RingFlashAttnLlama3Facts(),
        TorchCPFacts(),
        RingmasterUlyssesFacts(),
        RingmasterRingFacts(),
        RingmasterUSPFacts(),
        YunchangUlyssesFacts(),
        YunchangRingFacts(),
        YunchangUSPFacts(),
    )
)


def load_strategy_class(name: str) -> type[Strategy]:
    """Return the class that runs a strategy, from `attention.py` in the folder of its `facts.py`.

    Only ranks call it, because `attention.py` imports torch, which processes that read facts must not import.

    Raises:
        ConfigError: If the facts of a plug-in cannot be loaded.
    """
    folder = type(STRATEGIES[name]).__module__.removesuffix(".facts")
    code: type[Strategy] = importlib.import_module(f"{folder}.attention").STRATEGY
    return code
