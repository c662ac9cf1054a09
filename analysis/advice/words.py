"""How advice names options and numbers."""

from __future__ import annotations

from collections.abc import Callable

from analysis.advice.option import Option
from bench.cost.band import Band
from bench.cost.fit import Fit
from bench.labels import GIB, SIZES, size_label
from bench.strategies import STRATEGIES
from bench.strategies.options import default_text

FITS: dict[Fit | None, str] = {
    Fit.FITS: "fits",
    Fit.UNDECIDED: "undecided",
    Fit.OUT_OF_MEMORY: "out of memory",
    None: "",
}


def name_of(option: Option) -> str:
    """The strategy, with its layout and its own options where they are not its defaults."""
    cell, facts = option.cell, STRATEGIES[option.cell.strategy]
    layout = "" if cell.layout == facts.default_layout else f" {cell.layout}"
    chosen = (
        f" {key}={value}" for key, value in cell.options if value != default_text(facts.options[key], cell)
    )
    return f"{cell.strategy}{layout}{''.join(chosen)}"


def degree_of(option: Option) -> str:
    """Ranks that share a sequence, and of a hybrid how: `8`, `8 = 4 x 2`."""
    cell = option.cell
    if not STRATEGIES[cell.strategy].is_hybrid:
        return str(cell.sp_degree)
    return f"{cell.sp_degree} = {cell.ulysses_degree} x {cell.ring_degree}"


def full_name(option: Option) -> str:
    """`usp sp 8 = 4 x 2`."""
    return f"{name_of(option)} sp {degree_of(option)}"


def memory_of(option: Option) -> str:
    """`26.3 of 79.1 GiB`; with a band where the formula gives one."""
    if option.measured is not None:
        return "measured" if option.measured.ran_out else _size(option.measured.peak_allocated_bytes)
    assert option.prediction is not None
    need, usable = option.prediction.needed_bytes, option.prediction.usable_bytes
    unit = next((name for name, size in SIZES.items() if need.expected >= size), "KiB")
    low, expected, high = (f"{each / SIZES[unit]:.1f}" for each in (need.low, need.expected, need.high))
    amount = expected if low == high else f"{low} to {high}"
    if usable is None:
        return f"{amount} {unit}"
    return f"{amount}{'' if unit == 'GiB' else f' {unit}'} of {usable / GIB:.1f} GiB"


def sizes_of(option: Option) -> str:
    """Of an option without room: `needs 87.8 of 79.1 GiB`, or that it was seen."""
    return f"needs {memory_of(option)}" if option.measured is None else "measured"


def percents(low: float, high: float) -> str:
    """`-9.9 to -7.8 %`; one number where both read alike."""
    if percent(low) == percent(high):
        return percent(low)
    return f"{percent(low).removesuffix(' %')} to {percent(high)}"


def percent_band(values: Band) -> str:
    """`0.9 % (0.6 to 1.4 %)`; one number where its ends read alike."""
    if percent(values.low) == percent(values.high):
        return percent(values.expected)
    return f"{percent(values.expected)} ({percents(values.low, values.high)})"


def band(values: Band, label: Callable[[float], str]) -> str:
    """`1,560 (1,310 to 1,880)`; one number where its ends read alike."""
    low, expected, high = map(label, (values.low, values.expected, values.high))
    return expected if low == high else f"{expected} ({low} to {high})"


def number(value: float) -> str:
    """Three digits or more: `1,234` from a hundred on, `12.3` below, `1.23` below ten."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004  powers of ten
    return f"{value:,.{digits}f}"


def percent(fraction: float) -> str:
    """`12 %`, `0.9 %` below ten."""
    digits = 0 if abs(fraction) >= 0.0995 else 1  # noqa: PLR2004  reads 10 %
    return f"{100 * fraction:.{digits}f} %"


def listed(names: list[str], most: int = 4) -> str:
    """`a, b and c`; the first few of many, and how many more."""
    shown = names if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _size(size_bytes: float | None) -> str:
    return "" if size_bytes is None else size_label(size_bytes)
