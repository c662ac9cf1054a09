"""The columns of the table of cells. Each column states the views that show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from analysis.cells.capacity import capacity_label
from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE_STRATEGY
from analysis.cells.parts import parts_of, step_ms
from analysis.cells.series import variants
from analysis.cells.statuses import shown_status
from analysis.labels import (
    SHARED_CORES,
    band_label,
    count_label,
    interval_label,
    number_label,
    percent_label,
    samples_label,
    spread_label,
    status_label,
)
from analysis.read.metrics import METRICS, metric_text
from analysis.read.views import View
from analysis.show.section import Column
from bench.common.labels import MIB, length_label, rate_range_label
from bench.config import UNKNOWN_HARDWARE
from bench.record.record import Provenance

CellRow = Mapping[Any, Any]
"""Row of the frame of cells, with the name of the cell under `NAME`."""
NAME = "shown_name"
SETTINGS_WITH_COLUMN = frozenset({"sp_degree", "cluster.world_size"})
"""Settings that a cell's name leaves out because the table has a column for them."""
TERMINAL, FIRST_SCREEN, DETAILS = (
    frozenset({view}) for view in (View.TERMINAL, View.FIRST_SCREEN, View.DETAILS)
)
WIDE, NOT_ON_PAGE = frozenset({View.SUMMARY, View.PAGE}), frozenset({View.SUMMARY, View.DETAILS})
SPEED_UP = "speed-up"
ATTENTION, ALL = "attention communication", "all communication"
IN_FLIGHT = "exposed / in flight, worst rank"
NO_PEAK = "unknown: no file in conf/hardware/ names this device"
OUTSIDE_BYTES = 128 * MIB
"""Smallest memory outside torch's allocator that is shown; steps of sound CPU cells took up to 2 MiB."""
DISPENSABLE = ("95 % interval", "waiting", "transfer", "step ms", "n")
"""Headings of the columns that a narrow terminal leaves out, in this order."""


def named_rows(cells: Cells) -> list[CellRow]:
    """Return the rows of the cells, each with a name under NAME that tells it from others of its strategy."""
    keys = [key for key in cells.keys if key not in SETTINGS_WITH_COLUMN] if len(cells) else []
    pairs = zip(cells.rows, variants(cells.frame, keys), strict=True)
    return [{**cell, NAME: ", ".join(filter(None, (cell["strategy"], name)))} for cell, name in pairs]


def columns_of(cells: Cells) -> list[Column]:
    """Return COLUMNS with the views in which a table of these cells shows them.

    The page has room for ten columns. If it shows speed-ups, the step time moves to the details of a cell.
    A page that does not rank strategies shows no speed-up.
    """
    if cells.caveat is None and cells.frame["speed_up"].notna().any():
        return [replace(column, views=NOT_ON_PAGE) if column is STEP_TIME else column for column in COLUMNS]
    return [
        replace(column, views=column.views - {View.PAGE, View.DETAILS})
        if column.heading == SPEED_UP
        else column
        for column in COLUMNS
    ]


def metric_column(name: str, heading: str, views: frozenset[View]) -> Column:
    """Return a column that shows one metric."""
    return Column(heading, lambda cell: metric_text(cell, name), sorted_by=name, views=views)


def _pair_column(heading: str, metric: str, parts: tuple[str, str], views: frozenset[View]) -> Column:
    """Return a column with two metrics, `38.1 % / 61.0 %`; `parts` replace the {} in `metric`."""
    names = [metric.format(part) for part in parts]
    return Column(heading, partial(_pair_text, names), sorted_by=names[0], views=views)


def _share_columns(part: str) -> Iterator[Column]:
    """Yield columns of one share, `transfer` or `waiting`: with its range, and alone for narrow views."""
    share, name = f"attention_{part}", f"attention_{part}_share"
    yield Column(f"{ATTENTION}: {part}", partial(_share_with_range, share), sorted_by=name, views=WIDE)
    yield metric_column(name, part, TERMINAL)
    yield metric_column(name, f"attention: {part}", FIRST_SCREEN)


def is_predicted(cell: CellRow) -> bool:
    """Return whether the cost model predicted the cell and nothing ran."""
    return bool(cell["provenance"] == Provenance.PREDICTED)


def is_replayed(cell: CellRow) -> bool:
    """Return whether one rank of the cell ran without the others."""
    return bool(cell["provenance"] == Provenance.REPLAYED)


def speed_text(cell: CellRow) -> str:
    """Return tokens/s; for a prediction with the band, for a replay with and without the link's time."""
    if not is_replayed(cell) or pd.isna(cell["tokens_per_s"]):
        return value_with_band(cell, "tokens_per_s{}")
    with_link = cell["tokens_per_s_with_link"]
    return rate_range_label(None if pd.isna(with_link) else with_link, cell["tokens_per_s"])


def predicted_band(cell: CellRow, column: str) -> str:
    """Return a predicted value with its band, `189 (161 to 237)`.

    Args:
        cell: Row of the cell.
        column: Name of the metric, with {} for the suffix `_low` or `_high` of the band's ends.
    """
    expected, low, high = (cell[f"predicted_{column.format(end)}"] for end in ("", "_low", "_high"))
    label = METRICS[column.format("")].text
    return "" if pd.isna(expected) else band_label(expected, low, high, label)


def value_with_band(cell: CellRow, column: str) -> str:
    """Return the value of a cell, with its band if the cell is predicted; `column` as in predicted_band."""
    if is_predicted(cell) and cell["status"] == "ok":
        return predicted_band(cell, column)
    return metric_text(cell, column.format(""))


def _status_text(cell: CellRow) -> str:
    """Return `OOM`, or `OOM (1 of 2)` if only some repeats failed."""
    label = status_label(shown_status(cell))
    repeats, failed = int(cell["repeats"]), int(cell["failed_repeats"])
    return f"{label} ({failed} of {repeats})" if 0 < failed < repeats else label


def _ranks_text(cell: CellRow) -> str:
    """Return `4/2` for 4 ranks and sp_degree 2; `?` stands for an unknown number."""
    counts = [cell[key] for key in ("cluster.world_size", "sp_degree")]
    return "/".join("?" if count is None or pd.isna(count) else str(int(count)) for count in counts)


def _spread_text(cell: CellRow) -> str:
    """Return the number of samples and the interval; for a replay only the number of samples."""
    if is_replayed(cell):
        return f"replayed, n={samples_label(cell)}" if samples_label(cell) else ""
    return "" if is_predicted(cell) else spread_label(cell)


def _interval_text(cell: CellRow) -> str:
    """Return the 95 % interval of a measured cell, `2,390-2,470`; empty for other cells."""
    is_measured = not is_replayed(cell) and not is_predicted(cell)
    return interval_label(cell).replace(" to ", "-") if is_measured else ""


def _peak_text(cell: CellRow) -> str:
    """Return `14.5 MiB (7.1 %)`, or for a prediction `14.5 MiB (14.0 MiB to 15.1 MiB), 7.1 %`."""
    size, share = value_with_band(cell, "peak_allocated{}_bytes"), percent_label(cell["capacity_share"])
    if size and share:
        size = f"{size}, {share}" if size.endswith(")") else f"{size} ({share})"
    return size + _outside_text(cell)


def _outside_text(cell: CellRow) -> str:
    """Return ` + 200.0 MiB outside torch` if a step took at least OUTSIDE_BYTES that no tensor explains."""
    size = metric_text(cell, "outside_allocator_bytes")
    return f" + {size} outside torch" if size and cell["outside_allocator_bytes"] >= OUTSIDE_BYTES else ""


def _share_with_range(share: str, cell: CellRow) -> str:
    """Return the median of the traced steps, and the range of several: `0.1 % (0.0 % to 0.4 %)`."""
    median = metric_text(cell, f"{share}_share")
    low, high = (metric_text(cell, f"{share}_{end}_share") for end in ("low", "high"))
    return median if not low or cell["traced_steps"] == 1 else f"{median} ({low} to {high})"


def _all_communication_text(cell: CellRow) -> str:
    """Return transfer and waiting of all communication with ranges; a dash stands for an unknown share."""
    texts = [_share_with_range(f"communication_{part}", cell) for part in ("transfer", "waiting")]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def _traced_steps_text(cell: CellRow) -> str:
    """Return the number of traced steps behind the shares: `n=5`, or `n=3 of 5` if two were left out."""
    if pd.isna(cell["traced_steps"]):
        return ""
    used, void = int(cell["traced_steps"]), int(cell["void_traced_steps"])
    return f"n={used} of {used + void}" if void else f"n={used}"


def _checks_text(cell: CellRow) -> str:
    """Return `9 of 10; 12 of 14`, checks made and steps compared; empty if the record does not say."""
    columns = (("checks_made", "checks"), ("steps_compared", "steps"))
    return "; ".join(filter(None, (_count_text(cell[part], cell[whole]) for part, whole in columns)))


def _count_text(part: Any, whole: Any) -> str:
    return "" if pd.isna(whole) else f"{int(part):,} of {int(whole):,}"


def _pair_text(names: Sequence[str], cell: CellRow) -> str:
    """Return two metrics, `38.1 % / 61.0 %`, with a dash for an unknown one; empty if both are unknown."""
    texts = [metric_text(cell, name) for name in names]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def _mfu_text(cell: CellRow) -> str:
    """Return MFU by causal and full FLOPs, or a note that the peak of the device is unknown."""
    is_unknown = cell["hardware"] == UNKNOWN_HARDWARE and bool(metric_text(cell, "step_time_ms"))
    return _pair_text(("mfu_causal", "mfu_full"), cell) or (NO_PEAK if is_unknown else "")


def _speed_up_text(cell: CellRow) -> str:
    """Return the speed-up over the fastest `local` cell, and the id of that cell."""
    return _ratio_to_base(cell, "speed_up", BASE_STRATEGY, "speed_up_base")


def _scaling_text(cell: CellRow) -> str:
    """Return the speed-up over the cell with the fewest ranks, and the parallel efficiency."""
    text = _ratio_to_base(cell, "scaling_speed_up", cell["scaling_base_strategy"], "scaling_base")
    caveat = f"; {SHARED_CORES}" if cell["cluster.device"] == "cpu" else ""
    return f"{text}, efficiency {metric_text(cell, 'scaling_efficiency')}{caveat}" if text else ""


def _ratio_to_base(cell: CellRow, column: str, strategy: str, base: str) -> str:
    """Return `1.90 times local on 1 rank (cell 0123456789ab)`; `base` is the prefix of the base's columns."""
    if pd.isna(cell[column]):
        return ""
    ranks = cell[f"{base}_ranks"]
    where = "" if pd.isna(ranks) else f" on {count_label(int(ranks), 'rank')}"
    return f"{metric_text(cell, column)} times {strategy}{where} (cell {cell[f'{base}_cell_id']})"


def _step_parts_text(cell: CellRow) -> str:
    """Return `ideal attention 1.20 ms + packing 0.30 ms + ... = 5.60 ms`, without parts that took no time."""
    if pd.isna(cell["part_attention_ms"]):
        return ""
    parts = " + ".join(f"{part.label} {number_label(ms)} ms" for part, ms in parts_of(cell))
    return f"{parts} = {number_label(step_ms(cell))} ms"


STRATEGY = Column("strategy", lambda cell: str(cell[NAME]), sorted_by="strategy", is_words=True)
LENGTH = Column("length", lambda cell: length_label(int(cell["seq_len"])), sorted_by="seq_len")
RANKS = Column("ranks/sp", _ranks_text, sorted_by="cluster.world_size", views=WIDE | TERMINAL)
STATUS = Column("status", _status_text, sorted_by="status", is_words=True)
STEP_TIME = Column(
    "step time (ms)",
    lambda cell: value_with_band(cell, "step_time{}_ms"),
    sorted_by="step_time_ms",
    views=WIDE,
)
SHOWN_METRICS = tuple(
    metric_column(metric.name, metric.heading or metric.name, metric.shown_in)
    for metric in METRICS.values()
    if metric.shown_in
)
"""Columns of the metrics that name the views in which they are shown."""
COLUMNS: Sequence[Column] = (
    STRATEGY,
    LENGTH,
    RANKS,
    STATUS,
    Column("tokens/s", speed_text, sorted_by="tokens_per_s"),
    Column("n and 95 % interval", _spread_text, sorted_by="n", views=WIDE),
    Column("n", lambda cell: samples_label(cell).replace("repeats", "rep."), views=TERMINAL),
    Column("95 % interval", _interval_text, views=TERMINAL),
    STEP_TIME,
    metric_column("step_time_ms", "step ms", TERMINAL),
    Column("peak allocated (of capacity)", _peak_text, sorted_by="peak_allocated_bytes", views=WIDE),
    Column("peak allocated", _peak_text, sorted_by="peak_allocated_bytes", views=FIRST_SCREEN),
    Column(
        "peak",
        lambda cell: metric_text(cell, "peak_allocated_bytes") + _outside_text(cell),
        sorted_by="peak_allocated_bytes",
        views=TERMINAL,
    ),
    *_share_columns("transfer"),
    *_share_columns("waiting"),
    Column(
        f"{ALL}: transfer / waiting",
        _all_communication_text,
        sorted_by="communication_transfer_share",
        views=NOT_ON_PAGE,
    ),
    Column("traced steps", _traced_steps_text, sorted_by="traced_steps", views=NOT_ON_PAGE),
    metric_column("traced_to_timed", "traced / timed", NOT_ON_PAGE),
    metric_column("speed_up", SPEED_UP, WIDE),
    *SHOWN_METRICS,
    Column("checks made; steps compared", _checks_text, sorted_by="checks_missing", views=NOT_ON_PAGE),
    metric_column("note", "note", NOT_ON_PAGE),
    metric_column("tokens_per_s_per_rank", "tokens/s per rank", DETAILS),
    metric_column("window_tokens_per_s", "tokens/s over the whole window", DETAILS),
    Column("MFU (causal / full)", _mfu_text, views=DETAILS),
    _pair_column("HFU (causal / full)", "hfu_{}", ("causal", "full"), DETAILS),
    Column(SPEED_UP, _speed_up_text, views=DETAILS),
    Column("strong scaling", _scaling_text, views=DETAILS),
    Column("memory one rank may use", capacity_label, views=DETAILS),
    metric_column("peak_reserved_bytes", "peak reserved", DETAILS),
    Column("parts of the step", _step_parts_text, views=DETAILS),
    _pair_column(f"{ATTENTION}: {IN_FLIGHT}", "attention_{}_share", ("exposed", "in_flight"), DETAILS),
    _pair_column(f"{ALL}: {IN_FLIGHT}", "communication_{}_share", ("exposed", "in_flight"), DETAILS),
    metric_column("straggler_gap_ms", "straggler gap (ms)", DETAILS),
)
"""Columns in their order in a row and in the details of a cell."""
