"""Peak memory of a rank: CUDA's own counters, or on the CPU tracked tensors; pages of the process beside."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.memory_limit import process_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's peaks in bytes; null where this device has no such figure."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resident_bytes: int
    base_resident_bytes: int


def reset_peak(device: torch.device) -> None:
    """Start a GPU's peaks anew; those of the CPU are tracked in a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_memory(device: torch.device, base_resident_bytes: int, cpu_peak_bytes: int | None) -> RankMemory:
    """Peaks since `reset_peak`; on the CPU `cpu_peak_bytes` comes from an AllocationTracker."""
    on_gpu = device.type == "cuda"
    return RankMemory(
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else cpu_peak_bytes,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        peak_resident_bytes=process_bytes("VmHWM"),
        base_resident_bytes=base_resident_bytes,
    )
