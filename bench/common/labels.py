"""Texts for numbers and values, such as `8k` and `14.5 MiB`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTH_UNITS: Mapping[str, int] = {"": 1, "k": 1024, "m": 1024 * 1024}
KIB, MIB, GIB = 1024, 1024**2, 1024**3
SIZES: Mapping[str, int] = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
MAX_SHOWN = 80
"""Largest length of a value in a message; longer values are cut."""


def length_label(tokens: int) -> str:
    """Return `8k` for 8192, `1m` for 1048576, and the plain number if it is not a multiple of 1024."""
    for unit, size in (("m", LENGTH_UNITS["m"]), ("k", LENGTH_UNITS["k"])):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def size_label(size_bytes: float) -> str:
    """Return a size in the largest binary unit that does not exceed it, for example `14.5 MiB`."""
    for unit, unit_bytes in SIZES.items():
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def rate_range_label(low: float | None, high: float) -> str:
    """Return the tokens/s of a replay, in which communication takes no time, as a range.

    An example is `12,900 to 13,400`, or `13,400` if both ends round to the same number.

    Args:
        low: Tokens/s with the time of communication added; None if it is unknown. The text is then
            `at most 13,400`.
        high: Tokens/s as replayed.
    """
    ends = [f"{rate:,.0f}" for rate in (low, high) if rate is not None]
    return f"at most {ends[0]}" if low is None else " to ".join(dict.fromkeys(ends))


def value_label(value: Any) -> str:
    """Return a value as the user may have typed it, in one line of at most MAX_SHOWN characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(value_label, value))}]"
    line = str(value)
    if isinstance(value, str) and (value.strip() != value or not value.isprintable()):
        line = repr(value)
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."


def duration_label(seconds: float) -> str:
    """Return a duration such as `45 s`, from two minutes on `3 min`, from two hours on `2 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:  # noqa: PLR2004  two minutes
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004


def checks_label(reasons: Mapping[str, str | None]) -> str:
    """Return a text such as `checked: tokens; not checked: objective (no loss)`.

    Args:
        reasons: Reason why each check was not made, by the check's name; None for a check that was made.
    """
    missing: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            missing.setdefault(reason, []).append(name)
    checked = ", ".join(name for name, reason in reasons.items() if reason is None)
    unchecked = ", ".join(f"{', '.join(names)} ({reason})" for reason, names in missing.items())
    return f"checked: {checked or 'nothing'}" + (f"; not checked: {unchecked}" if unchecked else "")
