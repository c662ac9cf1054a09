"""What must hold before a cell's numbers are believed: the right tokens, and the strategy that was asked for.

A configuration that is accepted and silently not applied is the field's commonest fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.config import RunConfig
from bench.record import Engagement, Losses
from bench.strategies import STRATEGIES

Sections = Mapping[str, Any]


def first_failure(cell: RunConfig, sections: Sections) -> str | None:
    """Why the cell's result is wrong, in one line, or None when every gate is passed."""
    reasons = (gate(cell, sections) for gate in GATES)
    return next((reason for reason in reasons if reason is not None), None)


def _tokens(cell: RunConfig, sections: Sections) -> str | None:  # noqa: ARG001
    """The ranks trained on the step's tokens, each once, at its position."""
    losses: Losses | None = sections["losses"]
    if losses is None:
        return None  # a workload without tokens
    for step, (seen, expected) in enumerate(zip(losses.tokens_digest, losses.expected_digest, strict=True)):
        if seen != expected:
            return (
                f"step {step}: the ranks saw other tokens than the step holds (digest {seen}, expected"
                f" {expected}); some were dropped, repeated or misplaced"
            )
    return None


def _shapes(cell: RunConfig, sections: Sections) -> str | None:
    """Attention on every rank was given a shard of the sequence and all heads."""
    engagement: Engagement = sections["engagement"]
    expected = [[cell.shard_len, cell.model.num_heads, cell.model.num_kv_heads]]
    for rank, seen in enumerate(engagement.attention_shapes):
        if seen != expected:
            return (
                f"rank {rank}: attention was given (tokens, query heads, KV heads) = {seen}, not {expected};"
                f" {cell.strategy} over sp_degree={cell.sp_degree} was not applied as configured"
            )
    return None


def _exchange(cell: RunConfig, sections: Sections) -> str | None:
    """Attention handed to collectives exactly the bytes that the strategy's formula says."""
    engagement: Engagement = sections["engagement"]
    expected = STRATEGIES[cell.strategy].exchange_bytes(cell)
    for rank, seen in enumerate(engagement.sent_bytes.get("attention", [0])):
        if seen != expected:
            return (
                f"rank {rank}: attention exchanged {seen} bytes in a step, {cell.strategy} over"
                f" sp_degree={cell.sp_degree} has to exchange {expected}; it was not applied as configured"
            )
    return None


GATES: Sequence[Callable[[RunConfig, Sections], str | None]] = (_tokens, _shapes, _exchange)
