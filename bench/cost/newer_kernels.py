"""Advice for cells that ran an older generation of flash attention than their GPU has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bench.attention.kernel_facts import GENERATIONS
from bench.common.command import sweep_words

SECOND_GENERATION = ("torch_flash", "flash_blocks", "flash_attn_2")
NEWER: Mapping[int, str] = {9: "FlashAttention-3", 10: "FlashAttention-4"}
"""The FlashAttention made for GPUs of a major compute capability."""


def newer_kernel_lines(ran: Collection[tuple[str, float | None]]) -> list[str]:
    """A line for each FlashAttention-2 kernel that ran on a GPU with a likely faster one.

    None where a cell of another kernel on such a GPU is among them.
    """
    on_newer = sorted(
        {(kernel, int(found)) for kernel, found in ran if found is not None and int(found) in NEWER}
    )
    if any(kernel not in (*SECOND_GENERATION, "math") for kernel, _ in on_newer):
        return []
    return [
        f"kernel={kernel} is FlashAttention-2; on {GENERATIONS[major]} {NEWER[major]} or cuDNN is likely"
        " faster, and the share of communication then higher. To compare:"
        f" {sweep_words()} -m kernel={kernel},cudnn seq_len=8k,32k"
        for kernel, major in on_newer
        if kernel in SECOND_GENERATION
    ]
