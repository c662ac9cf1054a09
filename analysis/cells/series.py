"""A series is what one line of a figure shows: a strategy, plus the settings that vary, and no others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.cells.comparison import FREE, FREE_GROUPS, varies
from analysis.read.frame import config_columns
from bench.config import NOT_USED, ConfigError
from bench.strategies import STRATEGIES
from bench.strategies.plot_style import PlotStyle

SOFTWARE = ("code", "torch")
"""Where they differ anywhere, they are named everywhere."""
FIRST = ("provenance", "hardware", "device_name", *SOFTWARE, "sp_degree", "cluster.world_size", "layout")
"""The order in which settings are tried: the sooner one tells cells apart, the fewer are needed."""
NEVER = frozenset(
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
"""The axes themselves, what the provenance says already, and what n does."""
WORDING: Mapping[str, str] = {
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
    "trainer": "{}",
    "workload": "{}",
}

Codes = npt.NDArray[np.intp]


OTHER_COLORS = ("#6699CC", "#AA3377", "#228833", "#BB5566", "#004488", "#997700")
OTHER_MARKERS = ((4, 1, 45), (5, 0, 36), (5, 1, 36), (8, 1, 0))
"""Stars and an upturned pentagon, which no strategy of ours has."""
OTHER_STYLES = tuple(PlotStyle(color, marker) for marker in OTHER_MARKERS for color in OTHER_COLORS)
"""Styles of strategies whose facts state none."""


@dataclass(frozen=True, slots=True)
class Series:
    """One strategy under one choice of the varying settings."""

    strategy: str
    style: PlotStyle
    variant: str
    variant_number: int
    rows: pd.DataFrame
    """Its cells, by length."""

    @property
    def label(self) -> str:
        return f"{self.strategy}, {self.variant}" if self.variant else self.strategy


def keys_and_number(summary: pd.DataFrame) -> tuple[list[str], pd.Series[int]]:
    """The columns that, beside strategy and length, tell these cells apart, and per cell its series' number.

    As few columns as it takes. Settings that must be equal in a comparison count where they differ anywhere;
    those that follow from the strategy, such as its default layout, only where they differ within one.
    """
    keys: list[str] = []
    number = _codes(summary["strategy"])
    for key in _candidates(summary):
        codes = _codes(summary[key])
        refined = pd.factorize(number * (codes.max() + 1) + codes)[0]
        if refined.max() > number.max() or _must_agree(key):
            keys.append(key)
            number = refined
    return keys, pd.Series(number, index=summary.index, dtype="int64")


def series_of(summary: pd.DataFrame, keys: Sequence[str]) -> Iterator[Series]:
    """The series of cells that these keys tell apart, strategies in alphabetical order and `local` first."""
    styles = styles_of(summary["strategy"].unique())
    for strategy in sorted(styles, key=lambda name: (name != "local", name)):
        cells = summary[summary["strategy"] == strategy]
        if not keys:
            yield Series(strategy, styles[strategy], "", 0, cells)
            continue
        for number, (_, rows) in enumerate(cells.groupby([*keys], dropna=False)):
            yield Series(strategy, styles[strategy], variant(rows.iloc[0], keys), number, rows)


def cell_names(summary: pd.DataFrame, keys: Sequence[str], number: pd.Series[int]) -> pd.Series[str]:
    """Per cell its strategy and what sets it apart from others of that strategy."""
    is_first = ~number.duplicated()
    firsts = summary.loc[is_first, ["strategy", *keys]]
    names = [
        ", ".join(filter(None, parts))
        for parts in zip(firsts["strategy"], variants(firsts, keys), strict=True)
    ]
    return number.map(dict(zip(number[is_first], names, strict=True))).astype("object")


def styles_of(strategies: Iterable[str]) -> dict[str, PlotStyle]:
    """Return each strategy's style: the one in its facts, else one that follows from its name.

    A plug-in that states the colour and marker of another strategy counts as one that states none. Where two
    would look alike, the later in the alphabet takes the next style that is free.
    """
    ours = {name: facts.style for name, facts in STRATEGIES.built_in.items() if facts.style is not None}
    taken = {style.color_and_marker for style in ours.values()}
    styles = {}
    for name in sorted({*strategies}):
        stated = None if name in ours else _plug_in_style(name)
        if stated is not None and stated.color_and_marker in taken:
            stated = None
        wanted = zlib.crc32(name.encode()) % len(OTHER_STYLES)
        turns = (*OTHER_STYLES[wanted:], *OTHER_STYLES[:wanted])
        free = (style for style in turns if style.color_and_marker not in taken)
        styles[name] = ours.get(name) or stated or next(free, turns[0])
        taken.add(styles[name].color_and_marker)
    return styles


def _plug_in_style(name: str) -> PlotStyle | None:
    """Return the style that an installed plug-in states; None where it states none or cannot be loaded."""
    with suppress(ConfigError, KeyError):
        return STRATEGIES[name].style
    return None


def variants(cells: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """What sets each cell apart, in a few words: `sp 4, fsdp2`."""
    columns = [map(_wordings(cells[key]).get, cells[key].tolist()) for key in keys]
    return [", ".join(filter(None, parts)) for parts in zip(*columns, strict=True)] or [""] * len(cells)


def variant(row: pd.Series[Any] | Mapping[Any, Any], keys: Sequence[str]) -> str:
    """The variant of one cell."""
    return ", ".join(filter(None, (_wording(key, row[key]) for key in keys)))


def _candidates(summary: pd.DataFrame) -> list[str]:
    known = [*FIRST, *config_columns(summary)]
    return [key for key in dict.fromkeys(known) if key not in NEVER and varies(summary, key)]


def _codes(column: pd.Series[Any]) -> Codes:
    """Per row the number of its value, missing being one of them."""
    return pd.factorize(column, use_na_sentinel=False)[0]


def _wordings(column: pd.Series[Any]) -> dict[Any, str]:
    """The words for each value of a column; many cells have few."""
    return {value: _wording(str(column.name), value) for value in column.dropna().unique().tolist()}


def _wording(key: str, value: Any) -> str:
    if pd.isna(value) or value == NOT_USED:
        return ""
    return WORDING.get(key, f"{key}={{}}").format(_whole(value))


def _must_agree(key: str) -> bool:
    spread = key in FREE or key.startswith(FREE_GROUPS)
    detail = "." in key or key == "device_name"
    return not spread and not detail


def _whole(value: Any) -> Any:
    """The number without a needless fraction: a column with gaps holds 4 as 4.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
