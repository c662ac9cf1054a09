"""What devices and machine did while the clock ran: the telemetry pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bench.config import RunConfig
from bench.passes.facts import PassFacts, RankReport, known_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTelemetry:
    """One rank's device and process over the timed window; samples in order, null where not known."""

    reason: str | None
    sample_ms: list[float]
    power_w: list[float] | None
    sm_clock_mhz: list[float] | None
    reference_clock_mhz: float | None
    utilisation: list[float] | None
    device_used_bytes: list[float] | None
    clock_events: list[str] | None
    """Every reason seen, by name."""
    foreign_processes: int | None
    """Processes on the device that are no ranks of the cell; null where NVML counts processes in another
    namespace."""
    throttled: bool | None
    load_average: float
    involuntary_switches: int
    cpus: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Devices and machine over the timed window, per rank; samples in order."""

    reason: str | None
    """Why figures are null."""
    throttled: bool | None
    """Whether any device was held back: by heat, by a power brake, or with its median SM clock under 75 % of
    `reference_clock_mhz` while it was neither idle nor at its power cap."""
    sample_ms: list[list[float]] | None
    """When samples were taken, from the window's start."""
    power_w: list[list[float]] | None
    sm_clock_mhz: list[list[float]] | None
    reference_clock_mhz: list[float] | None
    utilisation: list[list[float]] | None
    clock_events: list[list[str]] | None
    """Every clock-event reason that NVML gave, by name."""
    foreign_processes: list[int] | None
    """Processes that used a rank's device and are no ranks."""
    load_average: float
    """The machine's at the window's start."""
    involuntary_switches: list[int]
    """How often a rank lost its core in the window."""
    cpus: list[str] | None = None
    """Those that a rank may run on, as `0-15,32-47`; null in older records."""


class TelemetryFacts(PassFacts[RankTelemetry, Telemetry]):
    name = "telemetry"
    part = RankTelemetry
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Telemetry:  # noqa: ARG002
        parts = self.parts(reports)
        held_back = [part.throttled for part in parts]
        reduced = {
            "reason": reasons(parts),
            "throttled": True if True in held_back else None if None in held_back else False,
            "load_average": parts[0].load_average,
        }
        per_rank = {
            field.name: known_by_rank(parts, field.name)
            for field in fields(Telemetry)
            if field.name not in reduced
        }
        return Telemetry(**per_rank, **reduced)  # type: ignore[arg-type]


def reasons(parts: Sequence[RankTelemetry]) -> str | None:
    """Why figures are missing, each reason once."""
    met = dict.fromkeys(part.reason for part in parts if part.reason is not None)
    return "; ".join(met) or None


FACTS = TelemetryFacts()
