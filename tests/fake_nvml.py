"""NVML as a machine of several H100 would have it; what a GPU does is told by the rank on it.

`tests/fake_cuda.py` puts one in pynvml's place in the ranks, and the fixture `fake_gpus` in the launcher.
"""

# ruff: noqa: N802  the driver's names are pynvml's

from pathlib import Path
from types import SimpleNamespace

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 85_520_809_984
IDLE, BUSY = b"0", b"1"


def uuid(device):
    """Without the prefix, as torch has it."""
    return f"00000000-0000-0000-0000-{device:012d}"


def busy_file(folder, device):
    """Where the rank on a device tells, by one byte, whether the device runs a kernel."""
    return Path(folder) / f"gpu_{device}"


class NVMLError(Exception):
    value = 0


class FakeNvml:
    """pynvml's functions for `count` equal GPUs, all of them joined by NVLink."""

    NVMLError = NVMLError
    NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_NOT_FOUND = 12, 6, 28
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_NVLINK_MAX_LINKS = 1, 0, 18

    def __init__(self, count, folder):
        self.count, self.folder = count, folder

    def nvmlInit(self): ...

    def nvmlShutdown(self): ...

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13_000

    def nvmlDeviceGetMigMode(self, handle):
        return 0, 0

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return int(name.rpartition("-")[2])

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{uuid(handle)}"

    def nvmlDeviceGetName(self, handle):
        return NAME

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=MEMORY_BYTES, used=2**30, free=MEMORY_BYTES - 2**30)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 40

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return 1

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50

    def nvmlDeviceGetP2PStatus(self, one, other, kind):
        return 0

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return 1_900

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 1_980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return []

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return 9, 0

    def nvmlDeviceGetUtilizationRates(self, handle):
        told = busy_file(self.folder, handle)
        return SimpleNamespace(gpu=99 if told.exists() and told.read_bytes() == BUSY else 0)
