"""Splits cells into series: a strategy with the settings that vary. A figure draws a line for each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.cells.comparison import FREE_PREFIXES, FREE_SETTINGS, varies
from analysis.read.frame import config_columns
from bench.config import NOT_USED, ConfigError
from bench.strategies import STRATEGIES
from bench.strategies.plot_style import PlotStyle

SOFTWARE = ("code", "torch")
"""Columns of the software. If two cells differ in one, the names of all cells state it."""
TRIED_FIRST = (
    "provenance",
    "hardware",
    "device_name",
    *SOFTWARE,
    "sp_degree",
    "cluster.world_size",
    "layout",
)
"""Settings that are tried first as keys of series, because they separate many cells."""
NEVER_KEYS = frozenset(
    {
        "seq_len",
        "strategy",
        "experiment",
        "mode",
        "measure.repeats",
        "measure.repeats_budget_s",
        "measure.reference_budget_s",
    }
)
"""Settings that are no keys: axes of figures, and settings that the provenance or n already states."""
SETTING_TEXTS: Mapping[str, str] = {
    "sp_degree": "sp {}",
    "cluster.world_size": "{} ranks",
    "cluster.memory_limit_gib": "limit {} GiB",
    "cluster.ranks_per_gpu": "{} ranks a GPU",
    "cluster.network": "{}",
    "batch": "batch {}",
    "grad_accum": "{} micro-steps",
    "sequences_per_step": "{} sequences",
    "provenance": "{}",
    "replay.rank": "rank {}",
    "hardware": "{}",
    "device_name": "{}",
    "code": "code {}",
    "torch": "torch {}",
    "layout": "{}",
    "strategy.inner": "{} inner",
    "strategy.rotation": "{}",
    "kernel": "{}",
    "engine": "{}",
    "dtype": "{}",
    "model": "{}",
    "model.rope_scaling": "RoPE {}",
    "model.rope_factor": "x{}",
    "trainer": "{}",
    "workload": "{}",
}

ValueNumbers = npt.NDArray[np.intp]

OTHER_COLORS = ("#6699CC", "#AA3377", "#228833", "#BB5566", "#004488", "#997700")
OTHER_MARKERS = ((4, 1, 45), (5, 0, 36), (5, 1, 36), (8, 1, 0))
"""Stars and a pentagon upside down, which no built-in strategy has."""
OTHER_STYLES = tuple(PlotStyle(color, marker) for marker in OTHER_MARKERS for color in OTHER_COLORS)
"""Styles for strategies whose facts state none."""


@dataclass(frozen=True, slots=True)
class Series:
    """Cells of one strategy with the same values of all varying settings but the length."""

    strategy: str
    style: PlotStyle
    variant: str
    """Values of the settings in which series differ, `sp 4, fsdp2`; empty if series differ in none."""
    variant_number: int
    """Number that determines the fill of the markers."""
    rows: pd.DataFrame
    """Cells of the series, by length."""

    @property
    def label(self) -> str:
        return f"{self.strategy}, {self.variant}" if self.variant else self.strategy


def keys_and_number(summary: pd.DataFrame) -> tuple[list[str], pd.Series[int]]:
    """Return the columns that distinguish series besides strategy and length, and each cell's series number.

    There are no more columns than needed. A setting that must be equal in a comparison is a key wherever it
    differs. A setting that follows from the strategy, such as its default layout, is a key only where it
    differs within a strategy.
    """
    keys: list[str] = []
    number = _value_numbers(summary["strategy"])
    for key in _candidates(summary):
        values = _value_numbers(summary[key])
        refined = pd.factorize(number * (values.max() + 1) + values)[0]
        if refined.max() > number.max() or _must_agree(key):
            keys.append(key)
            number = refined
    return keys, pd.Series(number, index=summary.index, dtype="int64")


def series_of(summary: pd.DataFrame, keys: Sequence[str]) -> Iterator[Series]:
    """Yield the series that these keys distinguish: `local` first, then by name of the strategy."""
    styles = styles_of(summary["strategy"].unique())
    for strategy in sorted(styles, key=lambda name: (name != "local", name)):
        cells = summary[summary["strategy"] == strategy]
        if not keys:
            yield Series(strategy, styles[strategy], "", 0, cells)
            continue
        for number, (_, rows) in enumerate(cells.groupby([*keys], dropna=False)):
            yield Series(strategy, styles[strategy], variant(rows.iloc[0], keys), number, rows)


def cell_names(summary: pd.DataFrame, keys: Sequence[str], number: pd.Series[int]) -> pd.Series[str]:
    """Return each cell's name: its strategy and its values of the keys, `ring, sp 4`."""
    is_first = ~number.duplicated()
    firsts = summary.loc[is_first, ["strategy", *keys]]
    names = [
        ", ".join(filter(None, parts))
        for parts in zip(firsts["strategy"], variants(firsts, keys), strict=True)
    ]
    return number.map(dict(zip(number[is_first], names, strict=True))).astype("object")


def styles_of(strategies: Iterable[str]) -> dict[str, PlotStyle]:
    """Return each strategy's style: the style in its facts, else a style derived from its name.

    A plug-in whose facts state the colour and marker of another strategy is treated as if they stated none.
    Where two derived styles are equal, the strategy later in the alphabet takes the next free style.
    """
    built_in = {name: facts.style for name, facts in STRATEGIES.built_in.items() if facts.style is not None}
    taken = {style.color_and_marker for style in built_in.values()}
    styles = {}
    for name in sorted({*strategies}):
        stated = None if name in built_in else _plug_in_style(name)
        if stated is not None and stated.color_and_marker in taken:
            stated = None
        start = zlib.crc32(name.encode()) % len(OTHER_STYLES)
        candidates = (*OTHER_STYLES[start:], *OTHER_STYLES[:start])
        free = (style for style in candidates if style.color_and_marker not in taken)
        styles[name] = built_in.get(name) or stated or next(free, candidates[0])
        taken.add(styles[name].color_and_marker)
    return styles


def _plug_in_style(name: str) -> PlotStyle | None:
    """Return the style in the facts of an installed plug-in; None without a style or where loading fails."""
    with suppress(ConfigError, KeyError):
        return STRATEGIES[name].style
    return None


def variants(cells: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the texts of each cell's values of the keys: `sp 4, fsdp2`."""
    columns = [map(_setting_texts(cells[key]).get, cells[key].tolist()) for key in keys]
    return [", ".join(filter(None, parts)) for parts in zip(*columns, strict=True)] or [""] * len(cells)


def variant(row: pd.Series[Any] | Mapping[Any, Any], keys: Sequence[str]) -> str:
    """Return the text of one cell's values of the keys: `sp 4, fsdp2`."""
    return ", ".join(filter(None, (_setting_text(key, row[key]) for key in keys)))


def _candidates(summary: pd.DataFrame) -> list[str]:
    """Return the columns that may become keys of series, in the order in which they are tried."""
    columns = [*TRIED_FIRST, *config_columns(summary)]
    return [key for key in dict.fromkeys(columns) if key not in NEVER_KEYS and varies(summary, key)]


def _value_numbers(column: pd.Series[Any]) -> ValueNumbers:
    """Return a number for the value of each row. Equal values have one number; missing counts as a value."""
    return pd.factorize(column, use_na_sentinel=False)[0]


def _setting_texts(column: pd.Series[Any]) -> dict[Any, str]:
    """Return the text of each distinct value of a column."""
    return {value: _setting_text(str(column.name), value) for value in column.dropna().unique().tolist()}


def _setting_text(key: str, value: Any) -> str:
    if pd.isna(value) or value == NOT_USED:
        return ""
    return SETTING_TEXTS.get(key, f"{key}={{}}").format(_without_fraction(value))


def _must_agree(key: str) -> bool:
    """Return whether cells must agree in a setting to be compared; False for details such as `model.x`."""
    is_free = key in FREE_SETTINGS or key.startswith(FREE_PREFIXES)
    is_detail = "." in key or key == "device_name"
    return not is_free and not is_detail


def _without_fraction(value: Any) -> Any:
    """Return a whole number as int, because a column with missing values holds 4 as 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
