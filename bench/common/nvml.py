"""Facts of the visible GPUs and of the links between them, read through NVML; never initializes CUDA."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

DEVICE_NODES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
"""Files that exist if the operating system has loaded a driver for a GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that says which GPUs a process sees."""
ALL_HIDDEN = frozenset({"", "-1", "none", "nodevfiles"})
"""Values of CUDA_VISIBLE_DEVICES, in lower case, with which users and Slurm hide all GPUs."""
MIG = "MIG-"
"""Prefix of the name of a MIG slice."""
TOPOLOGY: Mapping[int, str] = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvidia-smi's name of the nearest common ancestor of two GPUs, by NVML's number: the same board, one PCIe
switch, several switches, a host bridge, a NUMA node, the whole system."""
MIG_WAY_OUT = (
    "only whole GPUs are supported: name GPUs without MIG in CUDA_VISIBLE_DEVICES, or switch MIG off"
    " (nvidia-smi -mig 0)"
)
P2P_READ, P2P_NVLINK = 0, 2
"""Constants of nvml.h. In nvidia-ml-py 13 the first is a tuple, which no function takes."""
P2P_STATUS: Mapping[int, str] = {
    0: "PCIe",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled",
    5: "not supported",
}
"""Peer access by NVML's status."""

Answer = TypeVar("Answer")
Handles = Sequence[Any]
"""NVML's handles of the visible GPUs, in order."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """GPUs that a process on this machine sees."""

    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    """Total memory of each GPU."""
    capabilities: tuple[str, ...] = ()
    """Compute capability of each GPU, for example `9.0`."""
    error: str | None = None
    """Reason why a GPU that this machine seems to have cannot be used, with a way out; None if there is no
    such GPU."""
    driver_cuda: tuple[int, int] | None = None
    """Newest CUDA version that the driver supports; None if the driver does not report it."""


def visible_gpus() -> VisibleGpus:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects.

    The result has no GPUs if NVML reports none, or if one of them cannot be used; `error` then says why.
    `error` stays None on a machine without GPUs, and if the user has hidden all GPUs.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = _visible_handles(pynvml)
        error = _mig_error(pynvml, handles) if handles else _none_visible(int(pynvml.nvmlDeviceGetCount()))
        if error is not None:
            return VisibleGpus(error=error)
        return VisibleGpus(
            names=tuple(str(pynvml.nvmlDeviceGetName(gpu)) for gpu in handles),
            memory_bytes=tuple(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) for gpu in handles),
            capabilities=tuple(
                ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(gpu))) for gpu in handles
            ),
            driver_cuda=_driver_cuda(pynvml),
        )
    except pynvml.NVMLError as failure:
        return VisibleGpus(error=_unreadable(pynvml, failure))


def _driver_cuda(nvml: Any) -> tuple[int, int] | None:
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10


def _none_visible(gpus: int) -> str | None:
    """Return an error if CUDA_VISIBLE_DEVICES names none of the machine's GPUs.

    Values that hide all GPUs on purpose are no error.
    """
    value = os.environ.get(VISIBLE, "")
    if gpus == 0 or value.strip().lower() in ALL_HIDDEN:
        return None
    if value.strip().startswith(MIG):
        return f"{VISIBLE}={value} names a MIG slice of a GPU; {MIG_WAY_OUT}"
    return f"{VISIBLE}={value} names none of the {gpus} GPUs of this machine; correct it or unset it"


def _mig_error(nvml: Any, handles: Handles) -> str | None:
    """Return an error if one of the GPUs is in MIG mode, in which CUDA shows only one slice to a process."""
    for handle in handles:
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError:  # GPU or driver without MIG
            continue
        if current:
            return f"{nvml.nvmlDeviceGetName(handle)} is divided into MIG slices; {MIG_WAY_OUT}"
    return None


def visible_uuids() -> list[str]:
    """Return the UUIDs of the visible GPUs, in order."""
    return _query(lambda nvml, gpus: [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus], [])


def gpu_facts() -> dict[str, Any]:
    """Return the facts of the visible GPUs that a record's `Environment` stores, by field name.

    Facts of single GPUs are lists, facts of pairs are dictionaries with keys such as `0-1`. Facts that the
    driver does not report are left out.
    """

    def facts(nvml: Any, gpus: Handles) -> dict[str, Any]:
        values: dict[str, Any] = {"gpu_driver": str(nvml.nvmlSystemGetDriverVersion())}
        for name, read in GPU_READERS.items():
            with suppress(nvml.NVMLError):
                values[name] = [read(nvml, gpu) for gpu in gpus]
        for name, read_pair in PAIR_READERS.items():
            with suppress(nvml.NVMLError):
                pairs = itertools.combinations(enumerate(gpus), 2)
                values[name] = {
                    f"{i}-{j}": read_pair(nvml, first, second) for (i, first), (j, second) in pairs
                }
        return {name: value for name, value in values.items() if value}

    return _query(facts, {})


def idle_gpus() -> set[int]:
    """Return the indices of the visible GPUs whose utilization is 0 %; none if it cannot be read."""

    def idle(nvml: Any, gpus: Handles) -> set[int]:
        busy = [nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]
        return {device for device, percent in enumerate(busy) if percent == 0}

    return _query(idle, set())


def visible_devices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the devices that a value of CUDA_VISIBLE_DEVICES selects, by CUDA's rules.

    An entry that names no device hides itself and all entries after it. A repeated device hides all devices.

    Args:
        variable: Value of the variable; None if it is not set.
        uuids: UUIDs of all devices.
    """
    if variable is None:
        return [*range(len(uuids))]
    chosen: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        index = _device_index(entry, uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _device_index(entry: str, uuids: Sequence[str]) -> int | None:
    """Return the index of the device that an entry names by its number or a unique prefix of its UUID.

    The result is None for any other entry, such as the name of a MIG slice.
    """
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matching = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _visible_handles(nvml: Any) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handles[index] for index in visible_devices(os.environ.get(VISIBLE), uuids)]


def _unreadable(nvml: Any, error: Any) -> str | None:
    """Return an error if a file of DEVICE_NODES shows a GPU that NVML cannot read.

    The result is None if there is no such file, or if the user has hidden all GPUs.
    """
    absent = (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_GPU_NOT_FOUND)
    hidden = os.environ.get(VISIBLE, "all").strip().lower() in ALL_HIDDEN
    node = next((node for node in DEVICE_NODES if node.exists()), None)
    if node is None or hidden or error.value in absent:
        return None
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        way_out = "start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver"
        return f"{node} exists, but NVML's library libnvidia-ml does not; {way_out}"
    return f"{node} exists, but NVML cannot read its GPU: {error}; run nvidia-smi to find the cause"


def _query(read: Callable[[Any, Handles], Answer], default: Answer) -> Answer:
    """Return what `read` returns for the visible GPUs, or `default` if NVML raises an error."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return read(pynvml, _visible_handles(pynvml))
    except pynvml.NVMLError:
        return default


def _active_nvlinks(nvml: Any, gpu: Any) -> int:
    """Return the number of active NVLinks. NVML raises an error for a link that the GPU does not have."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(gpu, link))
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            continue
    return active


def _common_ancestor(nvml: Any, first: Any, second: Any) -> str:
    level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
    return TOPOLOGY.get(level, f"level {level}")


def _peer_access(nvml: Any, first: Any, second: Any) -> str:
    """Return `NVLink`, `PCIe`, or the reason why the first GPU cannot read the second's memory."""
    status = int(nvml.nvmlDeviceGetP2PStatus(first, second, P2P_READ))
    if status == 0 and nvml.nvmlDeviceGetP2PStatus(first, second, P2P_NVLINK) == 0:
        return "NVLink"
    return P2P_STATUS.get(status, f"status {status}")


GPU_READERS: Mapping[str, Callable[[Any, Any], float]] = {
    # The enforced limit may be lower than the default one.
    "gpu_power_limit_w": lambda nvml, gpu: float(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)) / 1e3,
    "gpu_temperature_c": lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    "gpu_nvlinks": _active_nvlinks,
}
"""Function that reads each fact of a GPU, by the field of `Environment`."""
PAIR_READERS: Mapping[str, Callable[[Any, Any, Any], str]] = {
    "gpu_topology": _common_ancestor,
    "gpu_p2p": _peer_access,
}
"""Function that reads each fact of a pair of GPUs, by the field of `Environment`."""
