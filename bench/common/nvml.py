"""What NVIDIA's driver says of the visible GPUs and what is between them, by NVML; never touches CUDA."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

DEVICE_NODES = (Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
"""There where the kernel has a driver for a GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALL_HIDDEN = frozenset({"", "-1", "none", "nodevfiles"})
"""Values of CUDA_VISIBLE_DEVICES, in small letters, by which people and Slurm ask for no GPU."""
MIG = "MIG-"
"""How the name of a slice of a GPU begins."""
TOPOLOGY: Mapping[int, str] = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""The nearest that two GPUs have in common, as NVML numbers it and nvidia-smi calls it: one board, one PCIe
switch, several switches, a host bridge, a NUMA node, the system."""
MIG_WAY_OUT = (
    "ranks and figures here are of whole GPUs: name GPUs without MIG in CUDA_VISIBLE_DEVICES, or switch it"
    " off (nvidia-smi -mig 0)"
)
P2P_READ, P2P_NVLINK = 0, 2
"""Of nvml.h; nvidia-ml-py 13 has the first as a tuple, which no function takes."""
P2P_STATUS: Mapping[int, str] = {
    0: "PCIe",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled",
    5: "not supported",
}

Found = TypeVar("Found")
Handles = Sequence[Any]
"""NVML's own, of the visible GPUs in their order."""


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The devices at hand."""

    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    """Of each, in all."""
    capabilities: tuple[str, ...] = ()
    """The compute capability of each: `9.0`."""
    error: str | None = None
    """Why a GPU that this machine seems to have is not among them, and a way out; None where nothing speaks
    for one."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs; None where it does not say."""


def visible_gpus() -> VisibleGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; none, with or without an error, where NVML shows none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        there, handles = int(pynvml.nvmlDeviceGetCount()), _visible_handles(pynvml)
        unusable = _none_visible(there) if not handles else _sliced(pynvml, handles)
        if unusable is not None:
            return VisibleGpus(error=unusable)
        return VisibleGpus(
            names=tuple(str(pynvml.nvmlDeviceGetName(gpu)) for gpu in handles),
            memory_bytes=tuple(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) for gpu in handles),
            capabilities=tuple(
                ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(gpu))) for gpu in handles
            ),
            driver_cuda=_driver_cuda(pynvml),
        )
    except pynvml.NVMLError as error:
        return VisibleGpus(error=_unreadable(pynvml, error))


def _driver_cuda(nvml: Any) -> tuple[int, int] | None:
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10


def _none_visible(there: int) -> str | None:
    """An error line where CUDA_VISIBLE_DEVICES names no GPU here; None where it hides all on purpose."""
    value = os.environ.get(VISIBLE, "")
    if there == 0 or value.strip().lower() in ALL_HIDDEN:
        return None
    if value.strip().startswith(MIG):
        return f"{VISIBLE}={value} names a slice of a GPU; {MIG_WAY_OUT}"
    return f"{VISIBLE}={value} names none of the {there} GPUs here; correct it or unset it"


def _sliced(nvml: Any, handles: Handles) -> str | None:
    """An error line where one of these GPUs is cut into MIG slices: CUDA shows a process only one slice."""
    for handle in handles:
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError:  # a GPU, or a driver, that knows none
            continue
        if current:
            return f"{nvml.nvmlDeviceGetName(handle)} is cut into MIG slices; {MIG_WAY_OUT}"
    return None


def visible_uuids() -> list[str]:
    """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in their order; none where NVML shows none."""
    return _asked(lambda nvml, gpus: [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus], [])


def gpu_facts() -> dict[str, Any]:
    """What the driver says now of the visible GPUs, by its name in a record's environment.

    `gpu_driver`, one value each in the order of `gpus`, and one a pair such as `0-1`. What it does not say
    has no name.
    """

    def facts(nvml: Any, gpus: Handles) -> dict[str, Any]:
        found: dict[str, Any] = {"gpu_driver": str(nvml.nvmlSystemGetDriverVersion())}
        for name, read in OF_EACH.items():
            with suppress(nvml.NVMLError):
                found[name] = [read(nvml, gpu) for gpu in gpus]
        for name, read_pair in OF_PAIRS.items():
            with suppress(nvml.NVMLError):
                pairs = itertools.combinations(enumerate(gpus), 2)
                found[name] = {f"{i}-{j}": read_pair(nvml, one, other) for (i, one), (j, other) in pairs}
        return {name: value for name, value in found.items() if value}

    return _asked(facts, {})


def idle_gpus() -> set[int]:
    """Which of the visible GPUs, from 0, ran no kernel of late; none where the driver does not say."""

    def idle(nvml: Any, gpus: Handles) -> set[int]:
        busy = [nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]
        return {device for device, percent in enumerate(busy) if percent == 0}

    return _asked(idle, set())


def visible_devices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """The devices that a value of CUDA_VISIBLE_DEVICES leaves, as CUDA reads it.

    The first entry that names no device ends the list, and one that repeats a device empties it.
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
    """A device by its number, or by as much of its UUID as no other shares; a MIG slice is none."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matching = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _visible_handles(nvml: Any) -> list[Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handles[index] for index in visible_devices(os.environ.get(VISIBLE), uuids)]


def _unreadable(nvml: Any, error: Any) -> str | None:
    """That a device node speaks for a GPU which NVML cannot show; None for a machine without any."""
    absent = (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_GPU_NOT_FOUND)
    hidden = os.environ.get(VISIBLE, "all").strip().lower() in ALL_HIDDEN
    node = next((node for node in DEVICE_NODES if node.exists()), None)
    if node is None or hidden or error.value in absent:
        return None
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        way_out = "start a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install the driver"
        return f"{node} is there, but NVML's library libnvidia-ml is not; {way_out}"
    return f"{node} is there, but NVML cannot read its GPU: {error}; see what nvidia-smi says"


def _asked(read: Callable[[Any, Handles], Found], otherwise: Found) -> Found:
    """What is read of the visible GPUs; `otherwise` where NVML shows none, or does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return read(pynvml, _visible_handles(pynvml))
    except pynvml.NVMLError:
        return otherwise


def _active_nvlinks(nvml: Any, gpu: Any) -> int:
    """NVML has an error for a link that a device does not have, and so for each where there is no NVLink."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(gpu, link))
        except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
            continue
    return active


def _common_ancestor(nvml: Any, one: Any, other: Any) -> str:
    level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    return TOPOLOGY.get(level, f"level {level}")


def _peer_access(nvml: Any, one: Any, other: Any) -> str:
    """`NVLink`, `PCIe`, or why the first cannot read the second's memory."""
    status = int(nvml.nvmlDeviceGetP2PStatus(one, other, P2P_READ))
    if status == 0 and nvml.nvmlDeviceGetP2PStatus(one, other, P2P_NVLINK) == 0:
        return "NVLink"
    return P2P_STATUS.get(status, f"status {status}")


OF_EACH: Mapping[str, Callable[[Any, Any], float]] = {
    # What is enforced, which may be less than the device's own limit.
    "gpu_power_limit_w": lambda nvml, gpu: float(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)) / 1e3,
    "gpu_temperature_c": lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    "gpu_nvlinks": _active_nvlinks,
}
OF_PAIRS: Mapping[str, Callable[[Any, Any, Any], str]] = {
    "gpu_topology": _common_ancestor,
    "gpu_p2p": _peer_access,
}
