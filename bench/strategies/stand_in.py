"""Names the strategies that call our stand-in for flash-attn, and the kernels that it runs on."""

from __future__ import annotations

from collections.abc import Iterable

from bench.attention.kernel_facts import FLASH_ATTN
from bench.strategies import STRATEGIES


def stand_in_lines(used: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line on the strategies that call the stand-in, for each kernel.

    `used` are pairs of a strategy and the kernel that it ran on.
    """
    callers: dict[str, list[str]] = {}
    for strategy, kernel in sorted({*used}):
        facts = STRATEGIES.built_in.get(strategy)
        if facts is not None and facts.flash_attn_kernels and kernel not in facts.flash_attn_kernels:
            callers.setdefault(kernel, []).append(strategy)
    return [
        f"stand-in for flash-attn: {', '.join(strategies)} on kernel={kernel} (docs/implementations.md);"
        f" kernel={FLASH_ATTN}, on a GPU, calls flash-attn itself"
        for kernel, strategies in callers.items()
    ]
