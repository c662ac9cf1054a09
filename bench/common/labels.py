"""Numbers and values as people read them: `8k`, `14.5 MiB`, a value in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTH_UNITS: Mapping[str, int] = {"": 1, "k": 1024, "m": 1024 * 1024}
KIB, MIB, GIB = 1024, 1024**2, 1024**3
SIZES: Mapping[str, int] = {"GiB": GIB, "MiB": MIB, "KiB": KIB}
MAX_SHOWN = 80


def length_label(tokens: int) -> str:
    """`8k` for 8192, `1m` for 1048576, the plain number where it is no whole multiple."""
    for unit, size in (("m", LENGTH_UNITS["m"]), ("k", LENGTH_UNITS["k"])):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def size_label(size_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one: `14.5 MiB`."""
    for unit, unit_bytes in SIZES.items():
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def rate_range_label(least: float | None, most: float) -> str:
    """Tokens/s of a replay: `12,900 to 13,400`, or `at most 13,400` where the link's time is not known."""
    ends = [f"{rate:,.0f}" for rate in (least, most) if rate is not None]
    return f"at most {ends[0]}" if least is None else " to ".join(dict.fromkeys(ends))


def shown(value: Any) -> str:
    """A value as the user may have typed it, in one line that is not too long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    line = str(value)
    if isinstance(value, str) and (value.strip() != value or not value.isprintable()):
        line = repr(value)
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."


def duration_label(seconds: float) -> str:
    """`45 s`, from two minutes on `3 min`, from two hours on `2 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 120:  # noqa: PLR2004  two minutes
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004


def checks_label(reasons: Mapping[str, str | None]) -> str:
    """`checked: tokens; not checked: objective (no loss)`, of names, each with why it was not made."""
    missing: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            missing.setdefault(reason, []).append(name)
    made = ", ".join(name for name, reason in reasons.items() if reason is None)
    others = ", ".join(f"{', '.join(names)} ({reason})" for reason, names in missing.items())
    return f"checked: {made or 'nothing'}" + (f"; not checked: {others}" if others else "")
