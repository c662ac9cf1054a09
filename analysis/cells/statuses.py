"""Statuses as the report shows them: for predicted and replayed cells, memory may be undecided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.read.traced_shares import is_void
from bench.common.labels import GIB
from bench.cost.band import Fit
from bench.record.record import Provenance, Status

PREDICTED, PREDICTED_OUT = "predicted", "predicted_out"
FITS, UNDECIDED = "predicted_fits", "predicted_undecided"
REPLAY_UNDECIDED = "replayed_undecided"
"""Status of a replay that left less than SPARE_BYTES of memory free."""
SPARE_BYTES = 3 * GIB
"""Memory that NCCL and CUDA may need on a rank with peers, which a replay does not have. This is an
assumption: one rank with NCCL on an H100 held 2.1 GiB outside torch's allocator (results/reference/h100), and
more ranks were not measured."""
EXCLUDED = "excluded (traced step not representative)"
NOT_KNOWN = "excluded (not known from the trace)"
STATUS_OF_FIT: Mapping[str, str] = {
    Fit.FITS: FITS,
    Fit.UNDECIDED: UNDECIDED,
    Fit.OUT_OF_MEMORY: PREDICTED_OUT,
}
"""Shown status of a predicted cell, by the predicted fit."""
REPLACED = frozenset({Status.OK.value, Status.OUT_OF_MEMORY.value})
"""Statuses of predicted cells that the predicted fit replaces."""


def shown_status(cell: Mapping[Any, Any]) -> str:
    """Return the status of a cell for labels and glyphs: the record's, or one of the constants here."""
    status = str(cell["status"])
    if cell["provenance"] == Provenance.REPLAYED and status == Status.OK and cell["cluster.world_size"] > 1:
        # a comparison with a missing value is False
        has_no_spare = cell["device_memory_bytes"] - cell["device_used_bytes"] < SPARE_BYTES
        return REPLAY_UNDECIDED if has_no_spare else status
    if cell["provenance"] != Provenance.PREDICTED or status not in REPLACED:
        return status
    return (
        PREDICTED_OUT
        if status == Status.OUT_OF_MEMORY
        else STATUS_OF_FIT.get(str(cell["predicted_fit"]), PREDICTED)
    )


def shown_statuses(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the shown status of every row."""
    shown = frame["status"].astype("object")
    differ = frame["provenance"].isin([Provenance.PREDICTED, Provenance.REPLAYED])
    if differ.any():
        shown[differ] = [shown_status(cell) for cell in frame[differ].to_dict("records")]
    return shown


def excluded_statuses(frame: pd.DataFrame, column: str) -> pd.Series[str]:
    """Return the statuses, and EXCLUDED or NOT_KNOWN where a traced cell has no value in `column`."""
    status, ratio = frame["status"].astype("object"), frame["traced_to_timed"]
    is_missing = status.eq("ok") & ratio.notna() & frame[column].isna()
    reason = ratio.map(lambda ratio: EXCLUDED if is_void(ratio) else NOT_KNOWN, na_action="ignore")
    return status.where(~is_missing, reason)


def undecided_statuses(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the statuses, and UNDECIDED or REPLAY_UNDECIDED where a cell may not fit in memory."""
    shown = shown_statuses(frame)
    return shown.where(shown.isin([UNDECIDED, REPLAY_UNDECIDED]), frame["status"])
