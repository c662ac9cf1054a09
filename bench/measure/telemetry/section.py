"""Telemetry section of a record: state of devices and machine in the timed window. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, join_by_rank


class TelemetrySection(Struct, frozen=True, kw_only=True):
    """State of devices and machine in the timed window, as lists by rank; samples are in order of time."""

    reason: str | None
    """Reason why values are null; null if no value is."""
    throttled: bool | None
    """Whether any device was throttled: heat or a power brake slowed it, or its median SM clock was below
    75 % of `reference_clock_mhz`. The median leaves out samples in which the device was idle or at its power
    cap. Null if unknown."""
    sample_ms: list[list[float]] | None
    """Times of the samples, from the start of the window."""
    power_w: Annotated[list[list[float]], Meta(min_length=1)] | None
    """Power draw of the device, by rank and sample."""
    sm_clock_mhz: list[list[float]] | None
    """SM clock of the device, by rank and sample."""
    reference_clock_mhz: list[float] | None
    """Maximum SM clock of the device."""
    utilisation: list[list[float]] | None
    """Share of time in which a kernel ran, 0 to 1, by rank and sample."""
    clock_events: list[list[str]] | None
    """Names, by rank, of the clock-event reasons that NVML reported in any sample."""
    other_processes: list[int] | None
    """Number of processes on a rank's device that are not ranks of the cell; null if NVML reports process IDs
    of another PID namespace."""
    load_average: float
    """One-minute load average of the first rank's machine at the start of the window."""
    involuntary_context_switches: list[int]
    """Number of times in the window that the rank process lost its core to another process, by rank."""
    cpus: list[str] | None
    """CPUs of each rank, such as `0-15,32-47`; null if unknown."""


class RankTelemetry(TelemetrySection, frozen=True, kw_only=True):
    """Telemetry of one rank. Lists by rank have one entry."""

    device_used_bytes: list[list[float]] | None
    """Memory in use on the device, by rank and sample, for the memory pass."""


NOT_PER_RANK = ("reason", "throttled", "load_average")
"""Fields that are not lists by rank."""


class TelemetryFacts(PassFacts[RankTelemetry, TelemetrySection]):
    name = "telemetry"
    part_type = RankTelemetry
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> TelemetrySection:  # noqa: ARG002
        parts = self.parts(reports)
        throttled = [part.throttled for part in parts]
        per_rank = [name for name in TelemetrySection.__struct_fields__ if name not in NOT_PER_RANK]
        return TelemetrySection(
            **join_by_rank(parts, *per_rank),
            reason=joined_reasons(parts),
            throttled=True if True in throttled else None if None in throttled else False,
            load_average=parts[0].load_average,
        )


def joined_reasons(parts: Sequence[RankTelemetry]) -> str | None:
    """Return the ranks' different reasons why values are missing, as one text; None if none is missing."""
    reasons = dict.fromkeys(part.reason for part in parts if part.reason is not None)
    return "; ".join(reasons) or None


FACTS = TelemetryFacts()
