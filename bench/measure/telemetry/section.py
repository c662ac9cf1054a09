"""What devices and machine did while the clock ran: the telemetry pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, together


class TelemetrySection(Struct, frozen=True, kw_only=True):
    """Devices and machine over the timed window, per rank; samples in order."""

    reason: str | None
    """Why figures are null."""
    throttled: bool | None
    """Whether any device was held back: by heat, by a power brake, or with its median SM clock under 75 % of
    `reference_clock_mhz` while it was neither idle nor at its power cap."""
    sample_ms: list[list[float]] | None
    """When samples were taken, from the window's start."""
    power_w: Annotated[list[list[float]], Meta(min_length=1)] | None
    sm_clock_mhz: list[list[float]] | None
    reference_clock_mhz: list[float] | None
    utilisation: list[list[float]] | None
    clock_events: list[list[str]] | None
    """Every clock-event reason that NVML gave, by name."""
    other_processes: list[int] | None
    """Processes that used a rank's device and are no ranks of the cell; null where NVML counts processes in
    another namespace."""
    load_average: float
    """The machine's at the window's start."""
    involuntary_context_switches: list[int]
    """How often a rank lost its core in the window."""
    cpus: list[str] | None
    """CPUs of each rank, as `0-15,32-47`; null where the ranks do not know them."""


class RankTelemetry(TelemetrySection, frozen=True, kw_only=True):
    """One rank's, whose lists by rank are of one."""

    device_used_bytes: list[list[float]] | None
    """For the memory pass, in samples as the others."""


OF_ALL_RANKS = ("reason", "throttled", "load_average")
"""What is no list by rank."""


class TelemetryFacts(PassFacts[RankTelemetry, TelemetrySection]):
    name = "telemetry"
    part = RankTelemetry
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> TelemetrySection:  # noqa: ARG002
        parts = self.parts(reports)
        held_back = [part.throttled for part in parts]
        per_rank = [name for name in TelemetrySection.__struct_fields__ if name not in OF_ALL_RANKS]
        return TelemetrySection(
            **together(parts, *per_rank),
            reason=reasons(parts),
            throttled=True if True in held_back else None if None in held_back else False,
            load_average=parts[0].load_average,
        )


def reasons(parts: Sequence[RankTelemetry]) -> str | None:
    """Why figures are missing, each reason once."""
    met = dict.fromkeys(part.reason for part in parts if part.reason is not None)
    return "; ".join(met) or None


FACTS = TelemetryFacts()
