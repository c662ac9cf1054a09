"""Types of a strategy's options, `strategy.<key>` on the command line: words, a flag or a whole number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.config import AUTO, Cell

TRUE, FALSE = "true", "false"
"""Texts of a flag in a cell, which stores all options of a strategy as text."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Option that is true or false, such as `options = {"overlap": Flag(default=True)}`.

    The strategy reads it with `cell.flag("overlap")`.
    """

    default: bool | Callable[[Cell], bool]
    """Default value; if it depends on the cell, a function of the cell, and the YAML says `auto`."""


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Option that is a whole number, such as `options = {"chunks": WholeNumber(auto=lambda cell: 4)}`.

    The YAML says `auto`. The strategy reads the number with `cell.number("chunks")`.
    """

    auto: Callable[[Cell], int]
    """Function from a cell to the number that `auto` stands for; the cell's options are not set yet."""
    least: int = 1
    """Smallest legal value."""


Option = tuple[str, ...] | Flag | WholeNumber
"""Type of an option; a tuple is a choice of words, the default first."""


def flag_text(flag: bool) -> str:
    """Return the text of a flag in a cell."""
    return TRUE if flag else FALSE


def yaml_default(option: Option) -> Any:
    """Return the default of an option as the strategy's YAML states it, `auto` if it depends on the cell."""
    if isinstance(option, Flag):
        return AUTO if callable(option.default) else option.default
    return AUTO if isinstance(option, WholeNumber) else option[0]


def default_text(option: Option, cell: Cell) -> str:
    """Return the text of an option's default in this cell."""
    if isinstance(option, WholeNumber):
        return str(option.auto(cell))
    if isinstance(option, Flag):
        return flag_text(option.default(cell) if callable(option.default) else option.default)
    return option[0]


def legal_values(option: Option) -> str:
    """Return the legal values, separated by commas, for the help text."""
    if isinstance(option, WholeNumber):
        return f"{AUTO}, or a whole number from {option.least}"
    if isinstance(option, Flag):
        return ", ".join([AUTO] * callable(option.default) + [TRUE, FALSE])
    return ", ".join(option)
