"""What a device and its links can do, as a file of conf/hardware/ says it: peaks, and what is sustained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bench.attention.kernel_facts import GENERATIONS
from bench.command import sweep_words
from bench.config import ConfigError
from bench.cost.band import Band, End


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one device to the others."""

    name: str
    bytes_per_s: float
    """Of one device in one direction."""
    latency_s: float
    """Of one message, or of the first step of a collective."""
    hop_latency_s: float = 0.0
    """Of each further step of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device, of which a node holds some."""

    peak_flops_per_s: float
    """Dense, in 16 bits."""
    memory_bytes_per_s: float
    devices_per_node: int
    node: Link
    """To the devices of the same node."""
    network: Link
    """To those of other nodes."""
    matmul: Band
    """Share of the peak that large matrix products sustain."""
    memory: Band
    """Share of the memory's peak that elementwise operations sustain."""
    link: Band
    """Share of a link's rate that large messages sustain."""
    attention_forward: Mapping[str, Band]
    """Share of the peak that a kernel sustains on large blocks, by its name."""
    attention_backward: Mapping[str, Band]
    host_s_per_operation: Band
    """Seconds that Python takes to start one operation."""


SECOND_GENERATION = ("torch_flash", "flash_blocks", "flash_attn_2")
NEWER: Mapping[int, str] = {9: "FlashAttention-3", 10: "FlashAttention-4"}
"""The FlashAttention made for GPUs of a major compute capability."""
SLOWEST: Mapping[End, End] = {End.LOW: End.HIGH, End.EXPECTED: End.EXPECTED, End.HIGH: End.LOW}
"""A rate's lowest end makes a time's highest."""
NEEDED = ("links", "rates", "host_s_per_operation", "devices_per_node")
"""What a file must have for a time to be predicted."""


def lacking(facts: Mapping[str, Any]) -> list[str]:
    """What one file's content does not say and a prediction of times needs."""
    return [key for key in NEEDED if key not in facts]


def hardware_from(facts: Mapping[str, Any]) -> Hardware:
    """One file's content as numbers; raises ConfigError where it lacks what a prediction needs."""
    missing = lacking(facts)
    if missing:
        raise ConfigError(
            f"hardware={facts['name']}: its file in conf/hardware/ has no {missing[0]}, without which no time"
            " can be predicted; add it (docs/hardware.md), or name a device whose file has it, such as"
            " hardware=h100_80gb"
        )
    rates = facts["rates"]
    return Hardware(
        peak_flops_per_s=float(facts["peak_flops_per_s"]),
        memory_bytes_per_s=float(facts["memory_bytes_per_s"]),
        devices_per_node=int(facts["devices_per_node"]),
        node=Link(**facts["links"]["node"]),
        network=Link(**facts["links"]["network"]),
        matmul=Band(*rates["matmul"]),
        memory=Band(*rates["memory"]),
        link=Band(*rates["link"]),
        attention_forward={kernel: Band(*share) for kernel, share in rates["attention_forward"].items()},
        attention_backward={kernel: Band(*share) for kernel, share in rates["attention_backward"].items()},
        host_s_per_operation=Band(*facts["host_s_per_operation"]),
    )


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
