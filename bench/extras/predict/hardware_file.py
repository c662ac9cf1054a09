"""What a device and its links can do, as a file of conf/hardware/ says it: peaks, and what is sustained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.config import ConfigError
from bench.cost.band import Band, End
from bench.request.choices import options, read_option


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """Link between one device and the others."""

    name: str
    bytes_per_s: float
    """Bandwidth of one device in one direction."""
    latency_s: float
    """Latency of one message, or of the first step of a collective."""
    hop_latency_s: float = 0.0
    """Of each further step of a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device, of which a node holds some."""

    peak_flops_per_s: float
    """Dense, in 16 bits."""
    memory_bytes_per_s: float
    devices_per_node: int
    node: DeviceLink
    """To the devices of the same node."""
    network: DeviceLink
    """To those of other nodes."""
    matmul: Band
    """Share of the peak that large matrix products sustain."""
    memory: Band
    """Share of the memory's peak that elementwise operations sustain."""
    link: Band
    """Share of a link's rate that large messages sustain."""
    attention_forward: Mapping[str, Band]
    """Share of the peak that a kernel sustains on large blocks, by its name."""
    attention_backward: Mapping[str, Band]
    host_s_per_operation: Band
    """Seconds that Python takes to start one operation."""


SLOWEST: Mapping[End, End] = {End.LOW: End.HIGH, End.EXPECTED: End.EXPECTED, End.HIGH: End.LOW}
"""A rate's lowest end makes a time's highest."""
NEEDED = ("links", "rates", "host_s_per_operation", "devices_per_node")
"""What a file must have for a time to be predicted."""


def lacking(facts: Mapping[str, Any]) -> list[str]:
    """What one file's content does not say and a prediction of times needs."""
    return [key for key in NEEDED if key not in facts]


def hardware_from(facts: Mapping[str, Any]) -> Hardware:
    """One file's content as numbers; raises ConfigError where it lacks what a prediction needs."""
    missing = lacking(facts)
    if missing:
        raise ConfigError(
            f"hardware={facts['name']}: its file in conf/hardware/ has no {missing[0]}, without which no time"
            " can be predicted; add it (docs/hardware.md), or name a device whose file has it, such as"
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
    """Whether times can be predicted for a device: it has a file, which says what it sustains."""
    return name in options("hardware") and not lacking(read_option("hardware", name))


@cache
def hardware_of(name: str) -> Hardware:
    """Return a device of conf/hardware/ as the cost model needs it.

    Raises ConfigError where no file says enough of it.
    """
    if name not in options("hardware"):
        raise ConfigError(
            f"hardware={name}: no file of conf/hardware/ describes it, and without one no time can be"
            " predicted; name a device that has one, such as hardware=h100_80gb"
        )
    return hardware_from(read_option("hardware", name))


@cache
def another_cpu() -> Hardware:
    """Return the rates of one thread of a CPU that may not be this one, from conf/hardware/cpu.yaml."""
    return hardware_from(read_option("hardware", "cpu")["another_cpu"])
