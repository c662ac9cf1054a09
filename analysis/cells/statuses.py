"""Statuses as the report shows them; predicted and replayed cells may be undecided about memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.read.traced_shares import is_void
from bench.common.labels import GIB
from bench.cost.band import Fit
from bench.record.record import Provenance, Status

PREDICTED, FITS, UNDECIDED, RUNS_OUT = "predicted", "predicted_fits", "predicted_undecided", "predicted_out"
NO_SPARE = "replayed_undecided"
"""A replay that fitted with less than SPARE_BYTES left."""
SPARE_BYTES = 3 * GIB
"""Memory that NCCL and CUDA may hold on a rank with peers, and do not hold in a replay. Assumed: one rank of
NCCL on an H100 held 2.1 GiB outside of torch's allocator (results/reference/h100); more were not measured."""
EXCLUDED = "excluded (traced step not representative)"
NOT_KNOWN = "excluded (not known from the trace)"
OF_FIT: Mapping[str, str] = {Fit.FITS: FITS, Fit.UNDECIDED: UNDECIDED, Fit.OUT_OF_MEMORY: RUNS_OUT}
"""By the verdict on memory, what stands for the status of a predicted cell."""
SAYS_NOTHING = frozenset({Status.OK.value, Status.OUT_OF_MEMORY.value})
"""Statuses of predicted cells that the verdict on memory says more about."""


def shown_status(cell: Mapping[Any, Any]) -> str:
    """A status for labels and glyphs: the record's, or that of a prediction."""
    status = str(cell["status"])
    if cell["provenance"] == Provenance.REPLAYED and status == Status.OK and cell["cluster.world_size"] > 1:
        # a comparison with a missing number is false
        has_no_spare = cell["device_memory_bytes"] - cell["device_used_bytes"] < SPARE_BYTES
        return NO_SPARE if has_no_spare else status
    if cell["provenance"] != Provenance.PREDICTED or status not in SAYS_NOTHING:
        return status
    return RUNS_OUT if status == Status.OUT_OF_MEMORY else OF_FIT.get(str(cell["predicted_fit"]), PREDICTED)


def shown_statuses(frame: pd.DataFrame) -> pd.Series[str]:
    """The shown status of every row."""
    shown = frame["status"].astype("object")
    differ = frame["provenance"].isin([Provenance.PREDICTED, Provenance.REPLAYED])
    if differ.any():
        shown[differ] = [shown_status(cell) for cell in frame[differ].to_dict("records")]
    return shown


def excluded_statuses(frame: pd.DataFrame, column: str) -> pd.Series[str]:
    """The statuses, with EXCLUDED or NOT_KNOWN where a trace left no value in this column."""
    status, ratio = frame["status"].astype("object"), frame["traced_to_timed"]
    is_missing = status.eq("ok") & ratio.notna() & frame[column].isna()
    why = ratio.map(lambda each: EXCLUDED if is_void(each) else NOT_KNOWN, na_action="ignore")
    return status.where(~is_missing, why)


def undecided_statuses(frame: pd.DataFrame) -> pd.Series[str]:
    """The statuses, with UNDECIDED or NO_SPARE where it is left open whether there is memory."""
    shown = shown_statuses(frame)
    return shown.where(shown.isin([UNDECIDED, NO_SPARE]), frame["status"])
