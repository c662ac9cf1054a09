"""What each switch takes off the peak: the cells of `experiment=alst_ablation` as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.labels import bytes_label, percent_label
from analysis.metrics.definitions import text_of
from bench.labels import length_label
from bench.record import Provenance

EXPERIMENT = "alst_ablation"
HEADINGS = (
    "length", "on", "adds", "peak allocated", "saves", "by the formula", "measured / formula",
    "step time (ms)", "moved per step",
)  # fmt: skip
READING = (
    "Of the worst rank; each row beside the one that lacks only what it adds. A CPU rank has one memory, so"
    " offloading saves it nothing: what it has to move stands in the last column."
)
Row = Mapping[Any, Any]
SWITCHES: Mapping[str, Callable[[Row], bool]] = {
    "checkpointing": lambda cell: bool(cell["checkpointing"]),
    "optimizer offload": lambda cell: bool(cell["offload.optimizer"]),
    "chunked loss": lambda cell: bool(cell["loss"] == "chunked"),
    "shared sequences": lambda cell: bool(cell["sp_degree"] > 1),
    "activation offload": lambda cell: bool(cell["offload.activations"]),
    "tiled MLP": lambda cell: bool(cell["tiled_mlp"]),
}
"""Of two cells that lack one of a third's, the one is its base that lacks the last of these."""
MOVED: Mapping[str, str] = {
    "optimizer offload": "offloaded_optimizer_bytes",
    "activation offload": "offloaded_activation_bytes",
}
"""The column that says what a switch moves to host memory and back."""
NO_SAVING = "none: a CPU rank has one memory"
SAME_WORK = (
    *("seq_len", "model", "engine", "dtype", "kernel", "hardware"),
    *("device_name", "provenance", "code", "torch"),
)
On = frozenset[str]


def ablation_rows(cells: Cells) -> list[tuple[str, ...]]:
    """The experiment's cells in a reader's words, in the order of HEADINGS; none of any other cells."""
    frame = cells.frame[cells.frame["experiment"].eq(EXPERIMENT)]
    groups = frame.groupby([*SAME_WORK], dropna=False, sort=False)
    return [row for _, group in groups for row in _rows(cells.rows_of(group))]


def _rows(cells: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The rows of cells that differ by their switches only, fewest first."""
    known = {_on(cell): cell for cell in cells}
    for on in sorted(known, key=lambda on: (len(on), _in_order(on))):
        cell, added = known[on], _added(on, known)
        yield (
            length_label(int(cell["seq_len"])),
            ", ".join(_named(cell, each) for each in SWITCHES if each in on) or "nothing",
            "" if added is None else _named(cell, added),
            text_of(cell, "peak_allocated_bytes") or str(cell["status"]),
            *(("", "", "") if added is None else _savings(known[on - {added}], cell, added)),
            text_of(cell, "step_time_ms"),
            text_of(cell, MOVED[added]) if added is not None and added in MOVED else "",
        )


def _on(cell: Row) -> On:
    return frozenset(name for name, is_on in SWITCHES.items() if is_on(cell))


def _in_order(on: On) -> list[int]:
    return [place for place, name in enumerate(SWITCHES) if name in on]


def _added(on: On, known: Mapping[On, Row]) -> str | None:
    """What the cell has beyond its base; None where no cell has all the others."""
    return next((name for name in reversed([*SWITCHES]) if name in on and on - {name} in known), None)


def _named(cell: Row, switch: str) -> str:
    return str(cell["strategy"]) if switch == "shared sequences" else switch


def _savings(base: Row, cell: Row, added: str) -> tuple[str, str, str]:
    """What the switch saves, measured and by the formula, and the ratio; of a prediction the formula."""
    if added in MOVED and cell["cluster.device"] == "cpu":
        return NO_SAVING, "", ""
    measured, formula = (base[column] - cell[column] for column in ("peak_allocated_bytes", "needed_bytes"))
    if cell["provenance"] == Provenance.PREDICTED:
        return "", _signed(formula), ""
    ratio = measured / formula if formula else None
    return _signed(measured), _signed(formula), percent_label(ratio)


def _signed(size: float) -> str:
    if pd.isna(size):
        return ""
    return bytes_label(size) if size >= 0 else f"-{bytes_label(-size)}"
