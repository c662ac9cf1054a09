"""Ulysses against Ring Attention, measured. `observe` is for a training loop of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.observation import observe

__all__ = ["observe"]


def __getattr__(name: str) -> Any:
    """`observe` comes with torch, which what plans and reports must not import."""
    if name == "observe":
        from bench.observation import observe

        return observe
    raise AttributeError(f"module 'bench' has no attribute {name!r}")
