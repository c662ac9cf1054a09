"""The head limits as a table: on the terminal, as Markdown for people and as CSV for programs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.config import RunConfig
from bench.experiments.head_limits import Limit, limit_of

STRATEGY_COLUMNS = 18
DEGREE_COLUMNS = 8
LEGEND = (
    "yes: legal. KVxN: legal, and every KV head is sent N times.",
    "The number by KVxN: exchanged bytes, as a multiple of those of an exchange that sends each head once.",
    "UxR: what a hybrid chooses by itself: ulysses_degree=U ranks share heads, R such groups form a ring.",
    "no: refused for the reason given. Empty: a strategy whose ranks share no sequence has one degree.",
)


@dataclass(frozen=True, slots=True)
class Block:
    """One model's part of the table."""

    title: str
    marks: dict[str, dict[int, list[str]]]
    """By strategy and `sp_degree`, each mark a few short words."""
    reasons: list[str]
    """Why combinations are refused."""


def write_head_limits(cells: Sequence[RunConfig], folder: Path) -> None:
    """Write head_limits.csv and head_limits.md into the folder, and print the table."""
    limits = [limit_of(cell) for cell in cells]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head_limits.csv").write_text(csv_text(limits), encoding="utf-8")
    (folder / "head_limits.md").write_text(markdown_text(limits), encoding="utf-8")
    console = Console(highlight=False)
    print_table(limits, console)
    console.print(Text(f"table: {folder / 'head_limits.md'}, {folder / 'head_limits.csv'}"), soft_wrap=True)


def csv_text(limits: Sequence[Limit]) -> str:
    """One line per model, strategy and degree; what a refused cell lacks is empty."""
    text = StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Limit)], lineterminator="\n")
    writer.writeheader()
    for limit in limits:
        writer.writerow(asdict(limit) | {"refusals": "; ".join(limit.refusals)})
    return text.getvalue()


def markdown_text(limits: Sequence[Limit]) -> str:
    """A section for each model: the table, and the reasons of what is refused."""
    degrees = _degrees(limits)
    lines = ["# Head limits", "", *(f"- {line}" for line in LEGEND)]
    for block in blocks_of(limits):
        heads = ["strategy", *(f"sp {degree}" for degree in degrees)]
        rows = [[name, *(" ".join(marks.get(d, [])) for d in degrees)] for name, marks in block.marks.items()]
        lines += ["", f"## {block.title}", ""]
        lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
        lines += ["", *(f"- {reason}" for reason in block.reasons)] if block.reasons else []
    return "\n".join(lines) + "\n"


def print_table(limits: Sequence[Limit], console: Console) -> None:
    """The same for a terminal; where the degrees do not fit side by side, they continue below."""
    degrees = _degrees(limits)
    fits = max(1, (console.width - STRATEGY_COLUMNS) // DEGREE_COLUMNS)
    for block in blocks_of(limits):
        console.print(Text(f"\n{block.title}", style="bold"))
        for first in range(0, len(degrees), fits):
            console.print(_terminal_table(block, degrees[first : first + fits]))
        for reason in block.reasons:
            console.print(Text(reason, style="dim"))
    console.print()
    for line in LEGEND:
        console.print(Text(line))


def blocks_of(limits: Sequence[Limit]) -> list[Block]:
    """The limits model by model."""
    by_model: dict[str, list[Limit]] = {}
    for limit in limits:
        by_model.setdefault(limit.model, []).append(limit)
    return [_block(each) for each in by_model.values()]


def _block(limits: Sequence[Limit]) -> Block:
    first = limits[0]
    marks: dict[str, dict[int, list[str]]] = {}
    refused: dict[str, list[int]] = {}
    for limit in limits:
        marks.setdefault(limit.strategy, {})[limit.sp_degree] = _mark(limit)
        for reason in limit.refusals:
            general = reason.replace(f"sp_degree={limit.sp_degree} ", "sp_degree ")
            refused.setdefault(general, []).append(limit.sp_degree)
    return Block(
        title=f"{first.model}: {first.num_heads} query heads, {first.num_kv_heads} KV heads",
        marks=marks,
        reasons=[f"sp {', '.join(map(str, degrees))}: {reason}" for reason, degrees in refused.items()],
    )


def _mark(limit: Limit) -> list[str]:
    if limit.kv_repeats is None or limit.bytes_factor is None:
        return ["no"]
    repeated = [f"KVx{limit.kv_repeats}", f"{limit.bytes_factor:.2f}"]
    degrees = [f"{limit.ulysses_degree}x{limit.ring_degree}"] if limit.chooses_degrees else []
    return [*(repeated if limit.kv_repeats > 1 else ["yes"]), *degrees]


def _terminal_table(block: Block, degrees: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", width=STRATEGY_COLUMNS - 1)
    for degree in degrees:
        table.add_column(f"sp {degree}", width=DEGREE_COLUMNS - 1)
    for strategy, marks in block.marks.items():
        table.add_row(strategy, *("\n".join(marks.get(degree, [])) for degree in degrees))
    return table


def _degrees(limits: Sequence[Limit]) -> list[int]:
    return sorted({limit.sp_degree for limit in limits})
