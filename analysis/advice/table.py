"""Options as a table, the fastest first, and under it what cannot run and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from analysis.advice.option import Option
from analysis.advice.ranking import Behind, Ranking, behind
from analysis.advice.words import (
    FITS,
    band,
    degree_of,
    full_name,
    memory_of,
    name_of,
    number,
    percent,
    percents,
    sizes_of,
)
from bench.record import Provenance

COLUMNS: Mapping[str, bool] = {
    "strategy": False,
    "sp": False,
    "dp": True,
    "memory of a rank": False,
    "tokens/s of a rank": False,
    "of all": True,
    "transfer": True,
    "mostly": False,
    "against the first": False,
}
"""Headings, and whether their column ends flush on the right."""
COST = "1m tokens cost"


def table_of(ranking: Ranking, price: float | None, *, whole: bool) -> Table:
    """The options that can run: of each strategy the best, or all where it is to be `whole`."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, is_number in COLUMNS.items():
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    if price is not None:
        table.add_column(COST, no_wrap=True)
    for option in ranking.able if whole else ranking.best:
        table.add_row(*map(Text, [*_row(option, ranking.able[0]), *_cost(option, price)]))
    return table


def lines_below(ranking: Ranking, *, whole: bool) -> list[str]:
    """What the table leaves out: other degrees, what has no room, and what is not possible."""
    lines = [] if whole or not ranking.able else _other_degrees(ranking)
    if ranking.too_large:
        lines.append(f"Out of memory: {'; '.join(_least(ranking.too_large))}.")
    return [*lines, *(f"Not possible: {line}." for line in _reasons(ranking.refused))]


def _row(option: Option, first: Option) -> list[str]:
    ranks = option.cell.cluster.world_size
    measured = " measured" if option.provenance is Provenance.MEASURED else ""
    return [
        name_of(option),
        degree_of(option),
        str(option.cell.dp_degree),
        f"{memory_of(option)} {FITS[option.fit]}",
        f"{band(option.tokens_per_s, number)}{measured}",
        number(option.tokens_per_s.expected * ranks),
        percent(option.transfer.expected),
        f"{option.dominant} {percent(option.shares[option.dominant])}",
        "" if option is first else _against(behind(first, option)),
    ]


def _against(found: Behind) -> str:
    if not found.is_told:
        return "no clear difference"
    return percents(found.low, found.high)


def _cost(option: Option, price: float | None) -> list[str]:
    return [] if price is None else [band(option.cost(price), number)]


def _other_degrees(ranking: Ranking) -> list[str]:
    """Of the first's strategy, which need other memory and take other numbers of sequences a step."""
    first, *rest = ranking.able
    others = [each for each in rest if name_of(each) == name_of(first)]
    left = len(ranking.able) - len(ranking.best)
    if not left:
        return []
    told = (
        f"sp {degree_of(each)} {number(each.tokens_per_s.expected)} tokens/s, {memory_of(each)}"
        for each in others[:3]
    )
    named = f"Other degrees of {name_of(first)}: {'; '.join(told)}. " if others else ""
    return [f"{named}--all lists all {len(ranking.able)} options."]


def _least(options: Sequence[Option]) -> list[str]:
    """Per strategy the degree that needs least, unless the next one up would do."""
    least: dict[str, Option] = {}
    for option in options:
        least.setdefault(name_of(option), option)
    return [f"{full_name(option)}, {sizes_of(option)}" for option in least.values()]


def _reasons(options: Iterable[Option]) -> list[str]:
    """Of each strategy every kind of reason once, with all that it is about and the numbers of the first."""
    about: dict[tuple[str, str], list[Option]] = {}
    for option in options:
        assert option.refused is not None
        about.setdefault((name_of(option), re.sub(r"\d+", "", option.refused)), []).append(option)
    return [_reason(name, each) for (name, _), each in about.items()]


def _reason(name: str, options: Sequence[Option]) -> str:
    degrees = dict.fromkeys(map(degree_of, options))
    return f"{name} sp {', '.join(degrees)}: {options[0].refused}"
