"""Section, gate and checks of the attention pass, which measures `workload=attention`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.rules import Times, check_lengths
from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import NO_OTHER_RANKS, NOT_RUN, PassFacts, RankReport, first_beyond, join_by_rank
from bench.measure.parity.section import FLOORS

ERROR_FACTORS: Mapping[str, float] = {"out": 4.0, "dq": 10.0}
"""Largest error of a sound result, as a multiple of the error of the same kernel on one device.

In 16 bit the errors of strategies were up to 1.7 times the kernel's error in `out` and 3.9 times in `dq`.
The latter was in striped layout and fp16, in the row of an early token, whose `dq` is small."""
ULPS: Mapping[str, float] = {"fp64": 2**-52, "fp32": 2**-23, "fp16": 2**-10, "bf16": 2**-7}
"""Unit in the last place (ulp) of 1.0, by dtype."""


class AttentionSection(Struct, frozen=True, kw_only=True):
    """Times and errors of attention alone; a step of `timing` is one call, forward and backward."""

    forward_ms: Annotated[list[Times], Meta(min_length=1)]
    """Forward time of each timed call, by rank and call."""
    backward_ms: Annotated[list[Times], Meta(min_length=1)]
    """Backward time of each timed call, by rank and call."""
    one_device_forward_ms: Times | None = None
    """Forward time by call of the same kernel on whole sequences on rank 0, while the other ranks wait."""
    one_device_backward_ms: Times | None = None
    """Backward time by call of the same kernel on whole sequences on rank 0, while the other ranks wait."""
    one_device_reason: str | None = None
    """Reason for missing times of one device; null if they were measured."""
    error_rows: int
    """Number of sampled tokens."""
    error_ulps: Mapping[str, float | None]
    """Largest error of the sampled tokens against float64 by tensor, in units in the last place of the
    dtype at each row's own maximum; infinite where a number is not finite. A replay has no finite errors."""
    control_error_ulps: Mapping[str, float | None] | None = None
    """Largest error of the kernel on one device at the sampled tokens, by tensor, in the units of
    `error_ulps`."""

    def __post_init__(self) -> None:
        times = "forward_ms and backward_ms"
        check_lengths(f"Expected equally many {times} for each rank", *self.forward_ms, *self.backward_ms)
        single = self.one_device_forward_ms, self.one_device_backward_ms
        check_lengths("Expected equally many one_device_forward_ms and one_device_backward_ms", *single)


class AttentionFacts(PassFacts[AttentionSection, AttentionSection]):
    name = "attention"
    part_type = AttentionSection
    workload = "attention"

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> AttentionSection:  # noqa: ARG002
        """Return rank 0's section with the times of all ranks."""
        parts = self.parts(reports)
        return replace(parts[0], **join_by_rank(parts, "forward_ms", "backward_ms"))

    def gate(self, cell: Cell, section: AttentionSection) -> str | None:
        """Return a message if a result of a timed call is not finite, or too far from float64.

        The limit follows the error of the control, which is the same kernel on one device. Without a control,
        results only have to be finite.
        """
        where = f"of a timed call at {cell.seq_len:,} tokens is"
        name = first_beyond(section.error_ulps, dict.fromkeys(section.error_ulps, math.inf))
        if name is not None:
            return f"attention: {name} {where} not finite everywhere"
        control = section.control_error_ulps or {}
        errors = {name: section.error_ulps.get(name, 0.0) for name in control}
        limits = {name: _limit_ulps(name, cell.dtype, error or math.inf) for name, error in control.items()}
        name = first_beyond(errors, limits)
        if name is None:
            return None
        return (
            f"attention: {name} {where} off by {errors[name]:,.0f} ulps; the same kernel on one device is off"
            f" by {control[name]:,.0f} (limit {limits[name]:,.0f})"
        )

    def checks(self, cell: Cell, section: AttentionSection | None) -> list[Check]:
        """Return the checks that the last timed call is finite, and near float64 in the sampled rows."""
        finite = Check(what="results of a timed call", against="finite numbers")
        near = Check(what="sampled rows of a timed call", against="float64, by one device's error")
        if section is None:
            return [replace(check, reason=NOT_RUN) for check in (finite, near)]
        steps = len(section.forward_ms[0])
        finite = replace(finite, tokens=cell.seq_len, steps=1, of_steps=steps)
        reason = section.one_device_reason if cell.replay.rank is None else NO_OTHER_RANKS
        if section.control_error_ulps is None or reason is not None:
            return [finite, replace(near, reason=reason)]
        return [finite, replace(near, tokens=cell.seq_len, rows=section.error_rows, steps=1, of_steps=steps)]


def _limit_ulps(name: str, dtype: str, control: float) -> float:
    """Return the limit of `out` or `dq` in ulps, a multiple of the control's error (at least one ulp).

    The limit is at least the floor of the parity pass, converted to ulps.
    """
    floor = FLOORS[dtype].backward if name == "dq" else FLOORS[dtype].forward
    return max(floor / ULPS[dtype], ERROR_FACTORS[name] * max(1.0, control))


FACTS = AttentionFacts()
