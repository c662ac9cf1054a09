"""Fake of NVML and its driver that lacks some functions or fails after some samples."""

import threading
from functools import partial
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Driver:
    """Fake of pynvml for one device, which is lost after `dies_after` samples of its clock."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, *, dies_after=None, without=(), events=0, pids=()):
        self.dies_after, self.without, self.clock_samples, self.threads = dies_after, without, 0, set()
        answers = {
            "PowerUsage": ("power", 350_000),
            "ClockInfo": ("clock", 1_900),
            "MaxClockInfo": ("reference", 1_980),
            "CurrentClocksEventReasons": ("events", events),
            "UtilizationRates": ("utilisation", SimpleNamespace(gpu=97)),
            "MemoryInfo": ("memory", SimpleNamespace(used=2**30)),
            "ComputeRunningProcesses": ("processes", [SimpleNamespace(pid=pid) for pid in pids]),
        }
        for function, answer in answers.items():
            setattr(self, f"nvmlDeviceGet{function}", partial(self._answer, *answer))

    def _answer(self, name, value, *_):
        self.threads.add(threading.current_thread())
        self.clock_samples += name == "clock"
        if name in self.without:
            raise NVMLError("Not Supported")
        if self.dies_after is not None and self.clock_samples > self.dies_after:
            raise NVMLError("GPU is lost")
        return value

    def nvmlInit(self):  # noqa: N802  pynvml's name
        if "nvml" in self.without:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        raise NVMLError("Not Found")
