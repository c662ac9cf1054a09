"""The cells about attention alone as rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.cells.cells import Cells
from analysis.read.metrics import text_of
from analysis.show.tables.rows import is_replayed
from bench.common.labels import length_label

HEADINGS = (
    "strategy", "length", "ranks/sp", "forward (ms)", "backward (ms)", "TFLOP/s", "of one device / ranks",
    "out, ulps (kernel alone)", "dq, ulps (kernel alone)",
)  # fmt: skip
SHORT_HEADINGS = (
    "strategy", "length", "ranks/sp", "fwd ms", "bwd ms", "TFLOP/s", "of 1/P", "out ulps", "dq ulps",
)  # fmt: skip
"""HEADINGS as a terminal shows them."""
COLUMNS = (
    "strategy", "seq_len", "cluster.world_size", "attention_forward_ms", "attention_backward_ms",
    "attention_flops_per_s", "attention_of_single", "out_error_ulps", "dq_error_ulps",
)  # fmt: skip
"""The summary's column behind each of HEADINGS."""
READING = (
    "One call, no model around it; times are medians of the slowest rank. Of one device / ranks: the same"
    " kernel on one device, divided by the ranks that share a sequence, over this call. Ulps: units in the"
    " last place of the dtype at a row's maximum, the largest of some sampled tokens."
)
COLUMN = "attention_forward_ms"
"""Present where a cell was about attention alone."""


def attention_rows(cells: Cells) -> list[tuple[str, ...]]:
    """The cells about attention alone in a reader's words, in the order of HEADINGS."""
    timed = cells.frame[cells.frame[COLUMN].notna()]
    names = cells.names[timed.index]
    return [_row(cell, name) for cell, name in zip(cells.rows_of(timed), names, strict=True)]


def _row(cell: Mapping[Any, Any], name: str) -> tuple[str, ...]:
    return (
        name,
        length_label(int(cell["seq_len"])),
        f"{cell['cluster.world_size']}/{cell['sp_degree']}",
        text_of(cell, "attention_forward_ms"),
        text_of(cell, "attention_backward_ms"),
        text_of(cell, "attention_flops_per_s"),
        _of_single(cell),
        _beside(cell, "out_error_ulps"),
        _beside(cell, "dq_error_ulps"),
    )


def _of_single(cell: Mapping[Any, Any]) -> str:
    """Return the attention of a single call, an upper bound for a replay, whose link took no time."""
    text = text_of(cell, "attention_of_single")
    return f"at most {text}" if text and is_replayed(cell) else text


def _beside(cell: Mapping[Any, Any], column: str) -> str:
    """The error with that of the kernel alone: `1.2 (1.1)`."""
    error, control = text_of(cell, column), text_of(cell, f"control_{column}")
    return f"{error} ({control})" if control else error
