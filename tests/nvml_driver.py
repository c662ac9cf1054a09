"""A stand-in for NVML and its driver, which lacks what a test says, or dies."""

# ruff: noqa: N802  the driver's names are pynvml's

import threading
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Driver:
    """NVML's functions for one device, in pynvml's words; `dies_after` samples of the clock it is lost."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, *, dies_after=None, without=(), events=0, pids=()):
        self.dies_after, self.without, self.events, self.pids = dies_after, without, events, pids
        self.asked = 0
        self.threads = set()

    def _give(self, name, value):
        self.threads.add(threading.current_thread())
        if name in self.without:
            raise NVMLError("Not Supported")
        if self.dies_after is not None and self.asked > self.dies_after:
            raise NVMLError("GPU is lost")
        return value

    def nvmlInit(self):
        if "nvml" in self.without:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        raise NVMLError("Not Found")

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._give("power", 350_000)

    def nvmlDeviceGetClockInfo(self, handle, clock):
        self.asked += 1
        return self._give("clock", 1_900)

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return self._give("reference", 1_980)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._give("events", self.events)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._give("utilisation", SimpleNamespace(gpu=97))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._give("memory", SimpleNamespace(used=2**30))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self._give("processes", [SimpleNamespace(pid=pid) for pid in self.pids])
