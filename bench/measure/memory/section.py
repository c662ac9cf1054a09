"""Peak memory by rank: the memory pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.finite import worst
from bench.common.rules import Amount, SizesPerRank, check_lengths
from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, together
from bench.measure.telemetry import section as telemetry


class BlockClass(Struct, frozen=True, kw_only=True):
    """Blocks of memory of one kind."""

    role: str
    """Purpose of the storages."""
    dtype: str
    """Dtype of the largest tensor in such a block; `shape` is of the same one."""
    shape: list[int]
    count: int
    """Number of storages."""
    total_bytes: int
    """All of them together."""


class MemorySection(Struct, frozen=True, kw_only=True):
    """Peaks per rank, in bytes; null where not measured or not known.

    `allocated` counts tensors, `reserved` what the allocator holds for them. `peak_` is of the steady state:
    the timed window on a GPU, one later step on the CPU. `whole_life_` is the most of building the model, the
    first short step, which makes the optimizer's state, and the steady state. `_phase` is the part of the
    step in which the peak was reached: load (building, fetching), forward, loss, backward, optimizer.
    """

    peak_allocated_bytes: SizesPerRank | None
    peak_reserved_bytes: SizesPerRank | None = None
    peak_resident_bytes: SizesPerRank | None = None
    """The process's pages."""
    base_resident_bytes: SizesPerRank | None = None
    """What a rank holds before it builds anything."""
    peak_phase: list[str] | None = None
    forward_peak_bytes: SizesPerRank | None = None
    """The peak of a forward less what was there when it began; of `workload=attention` what a call takes."""
    forward_saved_bytes: SizesPerRank | None = None
    """What was there when it ended, less the same: what backward needs, and the result."""
    backward_peak_bytes: SizesPerRank | None = None
    """The peak of a backward less what was there when it began."""
    whole_life_allocated_bytes: SizesPerRank | None = None
    whole_life_reserved_bytes: SizesPerRank | None = None
    whole_life_phase: list[str] | None = None
    device_used_bytes: Annotated[list[Amount], Meta(min_length=1)] | None = None
    """The most that the whole device held while the clock ran, by NVML."""
    device_used_reason: str | None = None
    """Why that is not known."""
    limit_base_bytes: SizesPerRank | None = None
    """What a memory limit counts from."""
    allocator_settings: dict[str, str] | None = None
    """What CUDA's allocator says that it runs with, in torch's words; of the first rank, as all are told the
    same. Null on a CPU."""
    offloaded_activation_bytes: SizesPerRank | None = None
    """Layers' inputs that one step handed to host memory, and as many came back; on a CPU rank, whose only
    memory that is, none were copied. Null without `offload.activations`."""
    offloaded_optimizer_bytes: SizesPerRank | None = None
    """Gradients that one step has to copy to the optimizer in host memory, and weights back, together; a CPU
    rank copies them within its memory. Null without `offload.optimizer`."""

    def __post_init__(self) -> None:
        steady = (self.peak_allocated_bytes, self.peak_phase)
        for sizes, phases in (steady, (self.whole_life_allocated_bytes, self.whole_life_phase)):
            if phases is not None:
                check_lengths("Expected a size for each phase", sizes or [], phases)


OF_ALL_RANKS = ("device_used_bytes", "device_used_reason", "allocator_settings")
"""What is no list by rank, or is not in a rank's part: telemetry has seen it."""


class MemoryFacts(PassFacts[MemorySection, MemorySection]):
    name = "memory"
    part = MemorySection
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> MemorySection:  # noqa: ARG002
        parts, telemetries = self.parts(reports), telemetry.FACTS.parts(reports)
        used = together(telemetries, "device_used_bytes")["device_used_bytes"]
        per_rank = [name for name in MemorySection.__struct_fields__ if name not in OF_ALL_RANKS]
        return replace(
            parts[0],
            **together(parts, *per_rank),
            device_used_bytes=used and [worst(samples) for samples in used],
            device_used_reason=None if used else telemetry.reasons(telemetries),
        )


FACTS = MemoryFacts()
