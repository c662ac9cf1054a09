"""How attention is spread over ranks. May import ranks, attention and all below.

The one table of strategies: a new one is a folder here, a line below and a YAML in conf/strategy/. Or it is a
package of its own with an entry point: see docs/your_strategy.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bench.strategies.deepspeed_fpdt.facts import DeepSpeedFPDT
from bench.strategies.deepspeed_ulysses.facts import DeepSpeedUlysses
from bench.strategies.distflash_attn.facts import DistFlashAttn
from bench.strategies.gather_kv.facts import GatherKV
from bench.strategies.local.facts import Local
from bench.strategies.ring.facts import Ring
from bench.strategies.ring_flash_attn.facts import RingFlashAttn
from bench.strategies.ring_flash_attn_llama3.facts import RingFlashAttnLlama3
from bench.strategies.ring_self_attention.facts import RingSelfAttention
from bench.strategies.ringmaster_ring.facts import RingmasterRing
from bench.strategies.ringmaster_ulysses.facts import RingmasterUlysses
from bench.strategies.ringmaster_usp.facts import RingmasterUSP
from bench.strategies.table import StrategyTable
from bench.strategies.torch_cp.facts import TorchCP
from bench.strategies.ulysses.facts import Ulysses
from bench.strategies.ulysses_chunked.facts import UlyssesChunked
from bench.strategies.usp.facts import USP
from bench.strategies.yunchang_ring.facts import YunchangRing
from bench.strategies.yunchang_ulysses.facts import YunchangUlysses
from bench.strategies.yunchang_usp.facts import YunchangUSP

if TYPE_CHECKING:
    from bench.strategies.strategy import Strategy

STRATEGIES = StrategyTable(
    (
        Local(),
        Ulysses(),
        Ring(),
        USP(),
        UlyssesChunked(),
        GatherKV(),
        RingSelfAttention(),
        DistFlashAttn(),
        DeepSpeedUlysses(),
        DeepSpeedFPDT(),
        RingFlashAttn(),
        RingFlashAttnLlama3(),
        TorchCP(),
        RingmasterUlysses(),
        RingmasterRing(),
        RingmasterUSP(),
        YunchangUlysses(),
        YunchangRing(),
        YunchangUSP(),
    )
)


def runnable(name: str) -> type[Strategy]:
    """The strategy's code: `attention.py` beside its `facts.py`, imported only where ranks run.

    Facts are read by processes that must not import torch.
    """
    folder = type(STRATEGIES[name]).__module__.removesuffix(".facts")
    code: type[Strategy] = importlib.import_module(f"{folder}.attention").STRATEGY
    return code
