"""Choices of one strategy alone, `strategy.<key>` on the command line: words, a flag or a whole number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.config import AUTO, Cell

TRUE, FALSE = "true", "false"
"""A flag as a cell holds it: a strategy's own choices are texts there."""


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    default: bool | Callable[[Cell], bool]
    """A function of the cell is `auto` in the YAML."""


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A whole number; `auto` in the YAML."""

    auto: Callable[[Cell], int]
    """What `auto` is for this cell, whose own options are not known yet."""
    least: int = 1


Option = tuple[str, ...] | Flag | WholeNumber
"""A tuple is the words that may be chosen, the default first."""


def flag_text(flag: bool) -> str:
    """As a cell holds it."""
    return TRUE if flag else FALSE


def in_yaml(option: Option) -> Any:
    """What the strategy's file holds."""
    if isinstance(option, Flag):
        return AUTO if callable(option.default) else option.default
    return AUTO if isinstance(option, WholeNumber) else option[0]


def default_text(option: Option, cell: Cell) -> str:
    """What a cell holds that leaves the choice to us."""
    if isinstance(option, WholeNumber):
        return str(option.auto(cell))
    if isinstance(option, Flag):
        return flag_text(option.default(cell) if callable(option.default) else option.default)
    return option[0]


def in_words(option: Option) -> str:
    """The values it may have."""
    if isinstance(option, WholeNumber):
        return f"{AUTO}, or a whole number from {option.least}"
    if isinstance(option, Flag):
        return ", ".join([AUTO] * callable(option.default) + [TRUE, FALSE])
    return ", ".join(option)
