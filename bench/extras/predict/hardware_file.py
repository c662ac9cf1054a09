"""Rates of a device and its links from a file of conf/hardware/: peaks, and the shares sustained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.config import ConfigError
from bench.cost.band import Band, BandEnd
from bench.request.choices import options, read_option


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """Link between a device and other devices."""

    name: str
    bytes_per_s: float
    """Bandwidth of one device in one direction."""
    latency_s: float
    """Latency of one message, or of the first step of a collective."""
    hop_latency_s: float = 0.0
    """Latency of each further step of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Rates of one kind of device. A share has a band, from its lowest to its highest value."""

    peak_flops_per_s: float
    """Peak of dense 16-bit matrix products."""
    memory_bytes_per_s: float
    """Peak bandwidth of the device's memory."""
    devices_per_node: int
    node: DeviceLink
    """Link to the devices of the same node."""
    network: DeviceLink
    """Link to the devices of other nodes."""
    matmul: Band
    """Share of `peak_flops_per_s` that large matrix products sustain."""
    memory: Band
    """Share of `memory_bytes_per_s` that elementwise operations sustain."""
    link: Band
    """Share of a link's bandwidth that large messages sustain."""
    attention_forward: Mapping[str, Band]
    """Share of `peak_flops_per_s` that a kernel sustains on large blocks in forward, by kernel."""
    attention_backward: Mapping[str, Band]
    """Share of `peak_flops_per_s` that a kernel sustains on large blocks in backward, by kernel."""
    host_s_per_operation: Band
    """Seconds that Python takes to start one operation."""


RATE_END: Mapping[BandEnd, BandEnd] = {
    BandEnd.LOW: BandEnd.HIGH,
    BandEnd.EXPECTED: BandEnd.EXPECTED,
    BandEnd.HIGH: BandEnd.LOW,
}
"""End of a rate's band for each end of a time: the lowest rate gives the highest time."""
REQUIRED_KEYS = ("links", "rates", "host_s_per_operation", "devices_per_node")
"""Keys that a file needs so that times can be predicted."""


def missing_keys(facts: Mapping[str, Any]) -> list[str]:
    """Return the keys of REQUIRED_KEYS that the contents of a file lack."""
    return [key for key in REQUIRED_KEYS if key not in facts]


def hardware_from(facts: Mapping[str, Any]) -> Hardware:
    """Return the rates in a file's contents; raise ConfigError if keys for predicting times are missing."""
    missing = missing_keys(facts)
    if missing:
        raise ConfigError(
            f"hardware={facts['name']}: its file in conf/hardware/ lacks {missing[0]}, which predicting times"
            " needs; add it (docs/hardware.md), or name a device whose file has it, such as"
            " hardware=h100_80gb"
        )
    rates = facts["rates"]
    return Hardware(
        peak_flops_per_s=float(facts["peak_flops_per_s"]),
        memory_bytes_per_s=float(facts["memory_bytes_per_s"]),
        devices_per_node=int(facts["devices_per_node"]),
        node=DeviceLink(**facts["links"]["node"]),
        network=DeviceLink(**facts["links"]["network"]),
        matmul=Band(*rates["matmul"]),
        memory=Band(*rates["memory"]),
        link=Band(*rates["link"]),
        attention_forward={kernel: Band(*share) for kernel, share in rates["attention_forward"].items()},
        attention_backward={kernel: Band(*share) for kernel, share in rates["attention_backward"].items()},
        host_s_per_operation=Band(*facts["host_s_per_operation"]),
    )


def has_rates(name: str) -> bool:
    """Return whether a device has a file with all keys for predicting times."""
    return name in options("hardware") and not missing_keys(read_option("hardware", name))


@cache
def hardware_of(name: str) -> Hardware:
    """Return the rates of a device of conf/hardware/.

    Raises:
        ConfigError: The device has no file, or its file lacks keys for predicting times.
    """
    if name not in options("hardware"):
        raise ConfigError(
            f"hardware={name}: no file of conf/hardware/ describes this device, so no time can be predicted;"
            " name a device that has a file, such as hardware=h100_80gb"
        )
    return hardware_from(read_option("hardware", name))


@cache
def another_cpu() -> Hardware:
    """Return the rates of one thread of the CPU in conf/hardware/cpu.yaml, which may differ from this CPU."""
    return hardware_from(read_option("hardware", "cpu")["another_cpu"])
