"""What the page says of one record's prediction: its band, and what the expected step is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analysis.labels import band_label, bytes_label, number_label

Section = Mapping[str, Any]


def prediction_facts(record: Section) -> dict[str, str | None]:
    """Names and texts of what the record's prediction says; empty where it has none."""
    found = (record.get("analytic") or {}).get("prediction")
    if not found:
        return {}
    return {
        "predicted step time, ms": _band(found["step_time_ms"], number_label),
        "predicted step, ms by part": _terms(found.get("parts"), number_label, "_ms"),
        "predicted peak allocated": _band(found["peak_allocated_bytes"], bytes_label),
        "predicted memory by term": _terms(found.get("memory"), bytes_label),
        "predicted need of one rank, and what it may take": _need(found),
    }


def _band(band: Section, label: Callable[[float | None], str]) -> str:
    return band_label(band["expected"], band["low"], band["high"], label)


def _terms(terms: Section | None, label: Callable[[float | None], str], unit: str = "") -> str | None:
    """`attention 33.5; other compute 129`, without what is nothing."""
    if not terms:
        return None
    known = {name: value for name, value in terms.items() if isinstance(value, int | float) and value}
    return "; ".join(f"{name.removesuffix(unit).replace('_', ' ')} {label(known[name])}" for name in known)


def _need(found: Section) -> str:
    """`22.5 GiB of 79.1 GiB: fits`."""
    need, usable = _band(found["needed_bytes"], bytes_label), found.get("usable_bytes")
    if usable is None:
        return f"{need}; unknown what it may take"
    return f"{need} of {bytes_label(usable)}: {str(found.get('fit')).replace('_', ' ')}"
