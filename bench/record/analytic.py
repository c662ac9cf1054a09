"""Numbers of one step that arithmetic gives: FLOPs, bytes, and in some modes times."""

from __future__ import annotations

from msgspec import Struct

from bench.common.rules import Amount, Count, Whole
from bench.cost.band import Band, Fit


class PredictedStep(Struct, frozen=True, kw_only=True):
    """Expected time and memory of one step, on the rank with most to do."""

    step_time_ms: Band
    parts: dict[str, float]
    """Milliseconds of the expected step, part by part."""
    peak_allocated_bytes: Band
    """Bytes of tensors at their peak."""
    needed_bytes: Band
    """Bytes of tensors, CUDA's context and what the allocator cannot use."""
    memory: dict[str, float]
    """Bytes of the expected need, term by term."""
    usable_bytes: Whole | None
    """Bytes that one rank may take; null where they are not known."""
    fit: Fit | None
    """Whether the need fits; null where it is not known what a rank may take."""

    def __post_init__(self) -> None:
        for band in (self.step_time_ms, self.peak_allocated_bytes, self.needed_bytes):
            if not 0 < band.low <= band.expected <= band.high:
                raise ValueError("Expected a band above zero whose expected value lies between its ends")


class Analytic(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of one step that arithmetic gives; a number that is not known is left out."""

    tokens_per_step: Count
    """Tokens of whole sequences of all ranks."""
    model_flops_causal: Amount | None = None
    """FLOPs of all ranks, forward and backward, by the area that the causal mask leaves."""
    model_flops_full: Amount | None = None
    hardware_flops_causal: Amount | None = None
    """Model FLOPs and those of layers that are computed again in backward."""
    hardware_flops_full: Amount | None = None
    attention_forward_flops: Amount | None = None
    """FLOPs of one attention call of all ranks, by the area that the mask leaves."""
    attention_backward_flops: Amount | None = None
    attention_bytes: Whole | None = None
    """Bytes that one rank sends for attention; null for a strategy without a formula."""
    payload_bytes: dict[str, Amount] | None = None
    """Bytes that one rank sends, by purpose."""
    needed_bytes: Whole | None = None
    """Memory of one rank by the formula."""
    link_ms: dict[str, Band] | None = None
    """Milliseconds of a replayed step on the link, by purpose; null where the link's rates are not known."""
    prediction: PredictedStep | None = None
    """Null for a cell that ran."""
