"""Mixtures of experts, which are refused, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.config import ConfigError
from bench.request.layer_types import PLAIN_FAMILIES

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How a transformers configuration says that a model has experts."""
MODELS = ("qwen3_30b_a3b", "qwen3_235b_a22b")
"""Names that would fit beside those in conf/model/."""


def has_experts(numbers: Mapping[str, Any]) -> bool:
    """Whether a transformers configuration is that of a mixture of experts."""
    return numbers.get("model_type") not in PLAIN_FAMILIES and any(numbers.get(name) for name in COUNTS)


def experts_refused(what: str, model: str) -> ConfigError:
    """The error that says why, and the way out; `what` was asked for."""
    return ConfigError(
        f"{what}: {model} has experts, whose operations and memory are not counted, and of which float64, the"
        " checks' reference, selects others than bf16; choose a dense model, such as qwen3_32b"
    )
