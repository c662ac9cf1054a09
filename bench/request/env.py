"""Environment variables of the ranks, as the user's words: which may be set, and to what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.config import ALLOCATOR_VARIABLES, ConfigError
from bench.labels import shown

ENV_ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_",
    *ALLOCATOR_VARIABLES,
    "TORCH_NCCL_",
)


def env_pairs(raw: Any, device: str) -> tuple[tuple[str, str], ...]:
    """Name and value of each variable, sorted; raises ConfigError for one that would have no effect."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"env={shown(raw)}: must be variables by name; write env.NAME=value")
    for name, value in raw.items():
        if not name.startswith(ENV_ALLOWED):
            raise ConfigError(
                f"env.{name}: only variables that change communication or allocation can be set here"
                f" ({', '.join(ENV_ALLOWED)}); set others before the command"
            )
        if isinstance(value, list | Mapping) or value is None:
            raise ConfigError(f"env.{name}={shown(value)}: must be text; write env.{name}=value")
    pairs = tuple(sorted((name, str(value)) for name, value in raw.items()))
    for name, value in pairs:
        if name in ALLOCATOR_VARIABLES:
            _refuse_allocator(name, value, device)
    return pairs


def _refuse_allocator(name: str, value: str, device: str) -> None:
    said = f"env.{name}={shown(value)}"
    if device != "cuda":
        raise ConfigError(f"{said}: it sets CUDA's allocator, and the ranks run on the CPU; leave it out")
    if ":" not in value:
        raise ConfigError(f"{said}: must be settings with values; write env.{name}=expandable_segments:True")
    if "backend:" in value.replace(" ", ""):
        raise ConfigError(
            f"{said}: the backend is chosen when torch is imported, before any rank starts; set"
            f" {name}={value} before the command instead"
        )
