"""Advice to try a newer kernel on GPUs for which a newer FlashAttention exists."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bench.attention.kernel_facts import GENERATIONS
from bench.common.command import sweep_command

SECOND_GENERATION = ("torch_flash", "flash_blocks", "flash_attn_2")
"""Kernels that are FlashAttention-2."""
NEWER: Mapping[int, str] = {9: "FlashAttention-3", 10: "FlashAttention-4"}
"""FlashAttention version written for GPUs of a major compute capability."""


def newer_kernel_lines(ran: Collection[tuple[str, float | None]]) -> list[str]:
    """Return a line for each FlashAttention-2 kernel that ran on a GPU for which a newer version exists.

    There are no lines if a newer kernel ran on such a GPU as well.

    Args:
        ran: Kernel and compute capability of the GPU of each cell that ran; None if the capability is
            unknown.
    """
    on_newer = sorted(
        {
            (kernel, int(capability))
            for kernel, capability in ran
            if capability is not None and int(capability) in NEWER
        }
    )
    if any(kernel not in (*SECOND_GENERATION, "math") for kernel, _ in on_newer):
        return []
    return [
        f"kernel={kernel} is FlashAttention-2; on {GENERATIONS[major]} {NEWER[major]} or cuDNN is likely"
        " faster, and the share of communication then higher. To compare:"
        f" {sweep_command()} -m kernel={kernel},cudnn seq_len=8k,32k"
        for kernel, major in on_newer
        if kernel in SECOND_GENERATION
    ]
