"""What the rank's device and the machine did while the clock ran."""

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

from bench.measure.facts import of_one
from bench.measure.rank_pass import RankPass, Steps
from bench.measure.telemetry.section import RankTelemetry
from bench.ranks.device import own_cpus

PERIOD_S = 0.2
MAX_SAMPLES = 1000
"""Beyond it every other sample is dropped and the next are taken half as often."""
SLOW_CLOCK = 0.75
"""NVBench's threshold: a run below this part of the device's clock is throttled."""

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
FAULTS = ("hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake")
"""Reasons that a healthy device does not give under load."""
EXPLAINED = ("idle", "power_cap")
"""Reasons for a low clock that are no fault: nothing to do, and the device's own power limit."""

Figure = Callable[[Any, Any], float]
FIGURES: Mapping[str, Figure] = {
    "power_w": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "clock_events": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
    "utilisation": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "device_used_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
}
"""What is sampled, from NVML's module and a device's handle."""


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One device as NVML sees it; `nvml` is the pynvml module, `ranks_beside` share it with this rank."""

    nvml: Any
    handle: Any
    ranks_beside: int = 0

    def reference_clock_mhz(self) -> float | None:
        """The SM clock that the device could run at; None where the driver does not say."""
        try:
            return float(self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        except self.nvml.NVMLError:
            return None

    def other_processes(self) -> int | None:
        """Processes on the device that are no rank of the cell."""
        try:
            pids = [each.pid for each in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)]
        except self.nvml.NVMLError:
            return None
        return max(0, len(pids) - 1 - self.ranks_beside) if os.getpid() in pids else None


class TelemetrySampler:
    """Watches one rank's window; `read` gives what the last one showed."""

    def __init__(self, opened: NvmlDevice | str, period_s: float = PERIOD_S) -> None:
        """`opened` is the rank's device, or the reason why there is none."""
        self.period_s = period_s
        self.device = None if isinstance(opened, str) else opened
        self.reasons: list[str] = [opened] if isinstance(opened, str) else []
        self._samples: dict[str, list[float]] = {name: [] for name in FIGURES} if self.device else {}
        self._clear()

    def _clear(self) -> None:
        self._times_ms: list[float] = []
        self._samples = {name: [] for name in self._samples}
        self._load_average, self._switches = os.getloadavg()[0], 0

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around steps under the clock: a thread samples, nothing of it runs between the steps."""
        self._clear()
        stop = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(stop,), daemon=True)
        if self.device is not None:
            thread.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        try:
            yield
        finally:
            self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
            stop.set()
            if self.device is not None:
                thread.join()

    def read(self) -> RankTelemetry:
        """What the last window showed."""
        known = self._samples
        events = known.get("clock_events")
        seen = [name for name, bit in CLOCK_EVENTS.items() if any(int(bits) & bit for bits in events or ())]
        clock = self.device.reference_clock_mhz() if self.device else None
        return RankTelemetry(
            reason="; ".join(self.reasons) or None,
            sample_ms=[self._times_ms if known else []],
            power_w=of_one(known.get("power_w")),
            sm_clock_mhz=of_one(known.get("sm_clock_mhz")),
            reference_clock_mhz=of_one(clock),
            utilisation=of_one(known.get("utilisation")),
            device_used_bytes=of_one(known.get("device_used_bytes")),
            clock_events=None if events is None else [seen],
            other_processes=of_one(self.device.other_processes() if self.device else None),
            throttled=throttled(known.get("sm_clock_mhz"), events, clock),
            load_average=self._load_average,
            involuntary_context_switches=[self._switches],
            cpus=of_one(own_cpus()),
        )

    def _sample_until(self, stop: threading.Event) -> None:
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
        """One sample of every figure; a figure that fails is given up for good, with its reason."""
        device = self.device
        assert device is not None
        for name, samples in [*self._samples.items()]:
            try:
                samples.append(float(FIGURES[name](device.nvml, device.handle)))
            except device.nvml.NVMLError as error:
                del self._samples[name]
                when = f"lost after {len(samples)} samples" if samples else "not given"
                self.reasons.append(f"{name} {when}: {error}")
        self._times_ms.append(time_ms)


def throttled(
    clocks_mhz: Sequence[float] | None, events: Sequence[float] | None, reference_mhz: float | None
) -> bool | None:
    """Whether the device was held back: by heat or a power brake, or its median clock was under 75 %.

    `events` are the samples' reason bits. The clock counts in samples whose reasons do not explain it: an
    idle device is slow, and one at its power cap runs as fast as it is allowed to. None where neither clock
    nor reasons are known.
    """
    faults = sum(CLOCK_EVENTS[name] for name in FAULTS)
    if events is not None and any(int(bits) & faults for bits in events):
        return True
    if clocks_mhz is None or reference_mhz is None:
        return None if events is None else False
    explained = sum(CLOCK_EVENTS[name] for name in EXPLAINED)
    samples = zip(clocks_mhz, events or [0.0] * len(clocks_mhz), strict=False)
    unexplained = [clock for clock, bits in samples if not int(bits) & explained]
    return bool(unexplained) and statistics.median(unexplained) < SLOW_CLOCK * reference_mhz


def open_nvml(device: torch.device, nvml: Any | None = None, *, ranks_beside: int = 0) -> NvmlDevice | str:
    """This rank's device in NVML, found by its UUID; `nvml` stands in for the pynvml module."""
    if device.type != "cuda":
        return "no NVML figures: the ranks run on the CPU"
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return NvmlDevice(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), ranks_beside)
    except nvml.NVMLError as error:
        return f"no NVML figures: {error}"


class TelemetryPass(RankPass):
    telemetry: TelemetrySampler | None = None
    found: RankTelemetry | None = None

    def around_window(self) -> AbstractContextManager[Any]:
        if self.telemetry is None:
            subject = self.measurement.subject
            device = open_nvml(subject.device, ranks_beside=subject.ranks_beside)
            # All ranks of a node together ask the driver as often as one alone would.
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self.telemetry = TelemetrySampler(device, PERIOD_S * ranks)
        return self.telemetry.window()

    def run(self) -> Steps:
        """Reads at once what the window showed: other processes may come and go while traces are read."""
        self.found = None if self.telemetry is None else self.telemetry.read()
        yield from ()

    def part(self) -> RankTelemetry | None:
        return self.found


PASS = TelemetryPass
