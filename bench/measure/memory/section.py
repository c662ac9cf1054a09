"""Memory section of a record: peak memory by rank. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.finite import largest_error
from bench.common.rules import NonNegativeFloat, SizesPerRank, check_lengths
from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, join_by_rank
from bench.measure.telemetry import section as telemetry


class BlockClass(Struct, frozen=True, kw_only=True):
    """Live blocks of memory with equal role; dtype and shape are those of the largest tensor in a block."""

    role: str
    """Parameter, gradient, optimizer state, activation or other."""
    dtype: str
    shape: list[int]
    count: int
    total_bytes: int


class MemorySection(Struct, frozen=True, kw_only=True):
    """Peak memory in bytes, as lists by rank; null if not measured or not known.

    Steady state is the timed window on a GPU, and the inspected step, which follows it, on a CPU. The whole
    life covers building the model, the short first step, which makes the optimizer's state, and the steady
    state. A phase is load (building, fetching a batch), forward, loss, backward or optimizer.
    """

    peak_allocated_bytes: SizesPerRank | None
    peak_reserved_bytes: SizesPerRank | None = None
    """Peak bytes that CUDA's allocator reserved in steady state; null on a CPU."""
    peak_resident_bytes: SizesPerRank | None = None
    """Peak resident bytes of the rank process (VmHWM)."""
    base_resident_bytes: SizesPerRank | None = None
    """Resident bytes of the rank process before it builds anything."""
    outside_allocator_bytes: SizesPerRank | None = None
    """Rise of resident memory in the inspected step above twice that of tensors; null if not measured."""
    peak_phase: list[str] | None = None
    """Phase in which the steady state first reached its peak."""
    forward_peak_bytes: SizesPerRank | None = None
    """Peak of a forward pass above the bytes live at its start."""
    forward_saved_bytes: SizesPerRank | None = None
    """Bytes live at the end of a forward pass less those at its start: tensors saved for backward, and the
    result."""
    backward_peak_bytes: SizesPerRank | None = None
    whole_life_allocated_bytes: SizesPerRank | None = None
    whole_life_reserved_bytes: SizesPerRank | None = None
    """Peak bytes that CUDA's allocator reserved over the whole life; null on a CPU."""
    whole_life_phase: list[str] | None = None
    device_used_bytes: Annotated[list[NonNegativeFloat], Meta(min_length=1)] | None = None
    """Largest memory in use on the rank's whole device within the timed window, by NVML."""
    device_used_reason: str | None = None
    limit_base_bytes: SizesPerRank | None = None
    """Bytes that `cluster.memory_limit_gib` does not count; null without a limit."""
    allocator_settings: dict[str, str] | None = None
    """Settings of CUDA's allocator on the first rank, with torch's names; null on a CPU."""
    offloaded_activation_bytes: SizesPerRank | None = None
    """Bytes of layer inputs that one step moves to host memory and later back. A CPU rank counts them without
    a copy, because host memory is its only memory. Null without `offload.activations`, and for training
    stacks."""
    offloaded_optimizer_bytes: SizesPerRank | None = None
    """Bytes of gradients that one step copies to the optimizer in host memory, plus bytes of weights that it
    copies back. A CPU rank copies them within its memory. Null without `offload.optimizer`."""

    def __post_init__(self) -> None:
        check_lengths(
            "Expected values of equally many ranks", self.peak_resident_bytes, self.base_resident_bytes
        )
        steady = (self.peak_allocated_bytes, self.peak_phase)
        for sizes, phases in (steady, (self.whole_life_allocated_bytes, self.whole_life_phase)):
            if phases is not None:
                check_lengths("Expected a size for each phase", sizes or [], phases)


NOT_PER_RANK = ("device_used_bytes", "device_used_reason", "allocator_settings")
"""Fields that are not merged by rank: telemetry supplies the first two, and the third is equal on all
ranks."""


class MemoryFacts(PassFacts[MemorySection, MemorySection]):
    name = "memory"
    part_type = MemorySection
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> MemorySection:  # noqa: ARG002
        """Return the lists of all ranks, with the memory in use on their devices from the telemetry pass."""
        parts, telemetries = self.parts(reports), telemetry.FACTS.parts(reports)
        used_by_rank = join_by_rank(telemetries, "device_used_bytes")["device_used_bytes"]
        per_rank = [name for name in MemorySection.__struct_fields__ if name not in NOT_PER_RANK]
        return replace(
            parts[0],
            **join_by_rank(parts, *per_rank),
            device_used_bytes=used_by_rank and [largest_error(samples) for samples in used_by_rank],
            device_used_reason=None if used_by_rank else telemetry.joined_reasons(telemetries),
        )


FACTS = MemoryFacts()
