"""The cost model's prediction for a cell that ran: what `mode=predict` would have said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import convert

from analysis.metrics.recorded import Prediction, Recorded
from bench.config import ConfigError, RunConfig
from bench.record import Status

COMPARED = frozenset({Status.OK, Status.OUT_OF_MEMORY})
"""Statuses of cells that show whether a prediction was right."""


def predicted_for(record: Recorded) -> Prediction | None:
    """Return what is predicted of a record's cell: by the record, or else by today's model.

    None where no formula or no rates are known, and for cells that ended in another way than COMPARED.
    """
    if record.analytic is not None and record.analytic.prediction is not None:
        return record.analytic.prediction
    return _predicted(json.dumps(record.config)) if record.status in COMPARED else None


@cache
def _predicted(config: str) -> Prediction | None:
    """Return the prediction for a cell as records store it; repeats of a cell share one."""
    stored: Mapping[str, Any] = json.loads(config)
    if stored.get("cluster.device") != "cuda":
        return None  # no file says what a CPU sustains
    from bench.predict.predicted import prediction_of  # formulas, which few reports need

    try:
        prediction = prediction_of(RunConfig.from_flat(stored))
    except (ConfigError, KeyError, AttributeError):  # written by hand, or with a plug-in's strategy
        return None
    return None if prediction is None else convert(prediction.to_json(), Prediction)
