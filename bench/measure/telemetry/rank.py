"""Telemetry pass on a rank: NVML samples of its device, and load of the machine, in the timed window."""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure.facts import one_rank_list
from bench.measure.rank_pass import RankPass, StepRequests
from bench.measure.telemetry.section import RankTelemetry
from bench.ranks.device import allowed_cpus

PERIOD_S = 0.2
"""Seconds between two samples on a node, over the samples of all its ranks."""
MAX_SAMPLES = 1000
"""Largest number of samples; beyond it every other sample is dropped and the period doubles."""
SLOW_CLOCK = 0.75
"""Share of the device's maximum clock below which it counts as throttled (NVBench's threshold)."""

CLOCK_EVENTS: Mapping[str, int] = {
    "idle": 0x1,
    "applications_clocks": 0x2,
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
    "display_clock": 0x100,
}
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*)."""
FAULT_EVENTS = ("hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake")
"""Clock-event reasons that a healthy device does not report under load."""
HARMLESS_EVENTS = ("idle", "power_cap")
"""Clock-event reasons that explain a low clock without a fault: an idle device, or its power limit."""

NvmlQuery = Callable[[Any, Any], float]
QUERIES: Mapping[str, NvmlQuery] = {
    "power_w": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "clock_events": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    "utilisation": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "device_used_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
}
"""Sampled values by name, each a function of the pynvml module and a device handle."""


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One GPU in NVML, NVIDIA's management library."""

    nvml: Any
    """The pynvml module."""
    handle: Any
    other_ranks: int = 0
    """Number of other ranks of the cell on this device."""

    def reference_clock_mhz(self) -> float | None:
        """Return the maximum SM clock of the device; None if the driver does not report it."""
        try:
            return float(self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        except self.nvml.NVMLError:
            return None

    def other_processes(self) -> int | None:
        """Return the number of processes on the device that are not ranks of the cell.

        None if the query fails, or if NVML reports process IDs of another PID namespace.
        """
        try:
            pids = [process.pid for process in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)]
        except self.nvml.NVMLError:
            return None
        return max(0, len(pids) - 1 - self.other_ranks) if os.getpid() in pids else None


class TelemetrySampler:
    """Sampler of one rank's device in the timed window; `read` returns the values of the last window."""

    def __init__(self, device: NvmlDevice | str, period_s: float = PERIOD_S) -> None:
        """Create a sampler of a device, or of none; a string is the reason why NVML has no device."""
        self.period_s = period_s
        self.device = None if isinstance(device, str) else device
        self.reasons: list[str] = [device] if isinstance(device, str) else []
        self._samples: dict[str, list[float]] = {name: [] for name in QUERIES} if self.device else {}
        self._reset()

    def _reset(self) -> None:
        self._times_ms: list[float] = []
        self._samples = {name: [] for name in self._samples}
        self._load_average, self._switches = os.getloadavg()[0], 0

    @contextmanager
    def window(self) -> Iterator[None]:
        """Sample in a second thread while the context lasts, so that the thread of the steps does not."""
        self._reset()
        stop = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(stop,), daemon=True)
        if self.device is not None:
            thread.start()
        earlier_switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        try:
            yield
        finally:
            self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - earlier_switches
            stop.set()
            if self.device is not None:
                thread.join()

    def read(self) -> RankTelemetry:
        """Return the telemetry of the last window."""
        samples = self._samples
        events = samples.get("clock_events")
        event_names = [
            name for name, bit in CLOCK_EVENTS.items() if any(int(bits) & bit for bits in events or ())
        ]
        clock = self.device.reference_clock_mhz() if self.device else None
        return RankTelemetry(
            reason="; ".join(self.reasons) or None,
            sample_ms=[self._times_ms if samples else []],
            power_w=one_rank_list(samples.get("power_w")),
            sm_clock_mhz=one_rank_list(samples.get("sm_clock_mhz")),
            reference_clock_mhz=one_rank_list(clock),
            utilisation=one_rank_list(samples.get("utilisation")),
            device_used_bytes=one_rank_list(samples.get("device_used_bytes")),
            clock_events=None if events is None else [event_names],
            other_processes=one_rank_list(self.device.other_processes() if self.device else None),
            throttled=is_throttled(samples.get("sm_clock_mhz"), events, clock),
            load_average=self._load_average,
            involuntary_context_switches=[self._switches],
            cpus=one_rank_list(allowed_cpus()),
        )

    def _sample_until(self, stop: threading.Event) -> None:
        """Sample until `stop` is set or every query has failed."""
        start, period_s = time.monotonic(), self.period_s
        while True:
            self._sample((time.monotonic() - start) * 1e3)
            if len(self._times_ms) > MAX_SAMPLES:
                period_s *= 2
                self._times_ms = self._times_ms[::2]
                self._samples = {name: samples[::2] for name, samples in self._samples.items()}
            if not self._samples or stop.wait(period_s):
                return

    def _sample(self, time_ms: float) -> None:
        """Sample every value; a query that fails is not made again, and its error becomes a reason."""
        device = self.device
        assert device is not None
        for name, samples in [*self._samples.items()]:
            try:
                samples.append(float(QUERIES[name](device.nvml, device.handle)))
            except device.nvml.NVMLError as error:
                del self._samples[name]
                problem = f"lost after {len(samples)} samples" if samples else "not reported"
                self.reasons.append(f"{name} {problem}: {error}")
        self._times_ms.append(time_ms)


def is_throttled(
    clocks_mhz: Sequence[float] | None, events: Sequence[float] | None, reference_mhz: float | None
) -> bool | None:
    """Return whether heat, a power brake or another fault throttled the device, or its median clock was low.

    A low clock is below SLOW_CLOCK of the maximum. The median leaves out the samples in which the device was
    idle or at its power cap, because a low clock is then no fault.

    Args:
        clocks_mhz: SM clock of each sample.
        events: Bits of the clock-event reasons of each sample.
        reference_mhz: Maximum SM clock of the device.

    Returns:
        None if neither clocks nor reasons are known. False without a fault if only the reasons are known.
    """
    faults = sum(CLOCK_EVENTS[name] for name in FAULT_EVENTS)
    if events is not None and any(int(bits) & faults for bits in events):
        return True
    if clocks_mhz is None or reference_mhz is None:
        return None if events is None else False
    explained = sum(CLOCK_EVENTS[name] for name in HARMLESS_EVENTS)
    samples = zip(clocks_mhz, events or [0.0] * len(clocks_mhz), strict=False)
    unexplained = [clock for clock, bits in samples if not int(bits) & explained]
    return bool(unexplained) and statistics.median(unexplained) < SLOW_CLOCK * reference_mhz


def open_nvml(device: torch.device, nvml: Any | None = None, *, other_ranks: int = 0) -> NvmlDevice | str:
    """Return this rank's device in NVML, or the reason why there is none.

    Args:
        device: Device of the rank; NVML finds it by its UUID.
        nvml: Replacement of the pynvml module.
        other_ranks: Number of other ranks of the cell on this device.
    """
    if device.type != "cuda":
        return "no NVML figures: the ranks run on the CPU"
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return NvmlDevice(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), other_ranks)
    except nvml.NVMLError as error:
        return f"no NVML figures: {error}"


class TelemetryPass(RankPass):
    sampler: TelemetrySampler | None = None
    telemetry: RankTelemetry | None = None

    def around_window(self) -> AbstractContextManager[Any]:
        if self.sampler is None:
            subject = self.measurement.subject
            device = open_nvml(subject.device, other_ranks=subject.other_ranks_on_gpu)
            # Each rank samples less often, so that all ranks of a node together sample once per PERIOD_S.
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.sampler = TelemetrySampler(device, PERIOD_S * ranks)
        return self.sampler.window()

    def run(self) -> StepRequests:
        """Read the telemetry before later passes run: other processes on the device may end during them."""
        self.telemetry = None if self.sampler is None else self.sampler.read()
        yield from ()

    def part(self) -> RankTelemetry | None:
        return self.telemetry


PASS = TelemetryPass
