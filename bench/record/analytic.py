"""Section of a record with computed numbers: FLOPs, bytes, and in some modes times."""

from __future__ import annotations

from msgspec import Struct

from bench.common.rules import NonNegativeFloat, NonNegativeInt, PositiveInt
from bench.cost.band import Band, Fit


class PredictedStep(Struct, frozen=True, kw_only=True):
    """Predicted time and memory of one step, on the rank with the most work."""

    step_time_ms: Band
    parts: dict[str, float]
    """Milliseconds of each part of the expected step."""
    peak_allocated_bytes: Band
    """Peak bytes of tensors."""
    needed_bytes: Band
    """Peak bytes of tensors, CUDA's context and fragmentation of the allocator."""
    memory: dict[str, float]
    """Bytes of each term of the expected peak."""
    usable_bytes: NonNegativeInt | None
    """Bytes that one rank may use; null if they are unknown."""
    fit: Fit | None
    """Whether `needed_bytes` fits into `usable_bytes`; null if these are unknown."""

    def __post_init__(self) -> None:
        for band in (self.step_time_ms, self.peak_allocated_bytes, self.needed_bytes):
            if not 0 < band.low <= band.expected <= band.high:
                raise ValueError("Expected a band above zero whose expected value lies between its bounds")


class Analytic(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Computed numbers of one step. Unknown numbers are not stored."""

    tokens_per_step: PositiveInt
    """Tokens that all ranks together process in one step, without padding."""
    model_flops_causal: NonNegativeFloat | None = None
    """FLOPs of forward and backward on all ranks without recomputation, counting scores that the mask
    leaves."""
    model_flops_full: NonNegativeFloat | None = None
    """FLOPs as in `model_flops_causal`, but counting all scores."""
    hardware_flops_causal: NonNegativeFloat | None = None
    """FLOPs that all ranks execute, including recomputation and padding, counting scores that the mask
    leaves."""
    hardware_flops_full: NonNegativeFloat | None = None
    """FLOPs as in `hardware_flops_causal`, but counting all scores."""
    attention_forward_flops: NonNegativeFloat | None = None
    """FLOPs of one forward attention call on all ranks, counting scores that the mask leaves."""
    attention_backward_flops: NonNegativeFloat | None = None
    """FLOPs of one backward attention call on all ranks, counting scores that the mask leaves."""
    attention_bytes: NonNegativeInt | None = None
    """Bytes that one rank sends in attention; null for a strategy without a formula."""
    payload_bytes: dict[str, NonNegativeFloat] | None = None
    """Bytes that one rank sends, by purpose."""
    needed_bytes: NonNegativeInt | None = None
    """Predicted peak memory of one rank."""
    link_ms: dict[str, Band] | None = None
    """Milliseconds of a replayed step on the link, by purpose; null if the link's rates are unknown."""
    prediction: PredictedStep | None = None
    """Predicted step of a cell with `mode=predict`; null for a cell that ran."""
