"""CUDA's caching allocator: set by the cell's variables, and asked what it runs with.

A rank is forked from a process that has imported torch, which read these variables then: setting them in the
rank's environment alone would change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.ranks.allocator_settings import ALLOCATOR_VARIABLES, without_effect
from bench.ranks.log import RefusedError


def set_allocator(env: Mapping[str, str]) -> None:
    """Hand the cell's settings to torch, before anything is allocated; raises RefusedError for bad ones.

    Settings that torch took from the environment at its import stay, unless these replace them.
    """
    for name, value in _asked(env).items():
        try:
            torch._C._accelerator_setAllocatorSettings(value)
        except (RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise RefusedError(f"env.{name}={value}: torch {torch.__version__} refuses it: {said}") from error


def refuse_without_effect(env: Mapping[str, str]) -> None:
    """Raises RefusedError where the allocator does not report the cell's settings; a GPU must be claimed."""
    for name, value in _asked(env).items():
        reason = without_effect(value, reported_settings())
        if reason is not None:
            raise RefusedError(f"env.{name}={value}: has no effect in torch {torch.__version__}: {reason}")


def reported_settings() -> dict[str, Any]:
    """What the allocator says that it runs with; empty without a GPU, and where its backend does not say."""
    if not torch.cuda.is_initialized() or torch.cuda.memory.get_allocator_backend() != "native":
        return {}
    return dict(torch.cuda.memory._snapshot().get("allocator_settings", {}))


def settings_in_words(device: torch.device) -> dict[str, str] | None:
    """The same for the record, as text by name, with the backend; None on a CPU."""
    if device.type != "cuda":
        return None
    backend = torch.cuda.memory.get_allocator_backend()
    return {"backend": backend, **{name: str(value) for name, value in reported_settings().items()}}


def _asked(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in ALLOCATOR_VARIABLES if name in env}
