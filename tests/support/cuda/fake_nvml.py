"""Fake of NVML for a machine with several H100.

`fake_cuda.py` replaces pynvml with it in the ranks, and the fixture `fake_gpus` in the launcher.
"""

from types import SimpleNamespace

NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 85_520_809_984


def uuid(device):
    """Return the UUID of a device without its prefix, as torch has it."""
    return f"00000000-0000-0000-0000-{device:012d}"


class NVMLError(Exception):
    value = 0


ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlSystemGetDriverVersion": "580.95.05",
    "nvmlSystemGetCudaDriverVersion_v2": 13_000,
    "nvmlDeviceGetMigMode": (0, 0),
    "nvmlDeviceGetName": NAME,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=MEMORY_BYTES, used=2**30, free=MEMORY_BYTES - 2**30),
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 40,
    "nvmlDeviceGetNvLinkState": 1,
    "nvmlDeviceGetTopologyCommonAncestor": 50,
    "nvmlDeviceGetP2PStatus": 0,
    "nvmlDeviceGetPowerUsage": 350_000,
    "nvmlDeviceGetClockInfo": 1_900,
    "nvmlDeviceGetMaxClockInfo": 1_980,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0),
    "nvmlDeviceGetCurrentClocksEventReasons": 0,
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
}
"""Answers of functions that are equal for all devices."""


class FakeNvml:
    """Fake of pynvml for `count` equal GPUs that are all connected by NVLink."""

    NVMLError = NVMLError
    NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_NOT_FOUND = 12, 6, 28
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_NVLINK_MAX_LINKS = 1, 0, 18

    def __init__(self, count):
        self.nvmlDeviceGetCount = lambda: count
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetHandleByUUID = lambda name: int(name.rpartition("-")[2])
        self.nvmlDeviceGetUUID = lambda handle: f"GPU-{uuid(handle)}"
        for name, answer in ANSWERS.items():
            setattr(self, name, lambda *_, answer=answer: answer)
