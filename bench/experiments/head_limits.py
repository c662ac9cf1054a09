"""Which strategies and degrees the heads of a model allow, and what repeating KV heads costs.

It follows from the strategies' own facts, on cells resolved for a cluster that need not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.config import RunConfig
from bench.environment import Machine
from bench.request import values
from bench.request.choices import Raw, options, read_option
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts, exchanged_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Whether one strategy can split one model's heads at one degree, and what repeating KV heads costs."""

    model: str
    num_heads: int
    num_kv_heads: int
    strategy: str
    sp_degree: int
    ulysses_degree: int
    ring_degree: int
    chooses_degrees: bool
    """True for a hybrid, which chooses `ulysses_degree` itself."""
    seq_len: int
    refusals: tuple[str, ...]
    kv_repeats: int | None
    """How often each KV head is sent; None where the cell is refused."""
    exchange_bytes: int | None
    """What one rank sends in one step of `seq_len` tokens; None where the cell is refused."""
    bytes_factor: float | None
    """The same, over the bytes of an exchange that sends every KV head once; None where it is refused."""


def hypothetical_cells(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:  # noqa: ARG001
    """Per request a cell for every model, strategy and degree it leaves open, each on ranks enough.

    Equal cells are one: `local` has one rank at any requested degree. Raises ConfigError for an invalid
    value.
    """
    cells = (_cell_with_ranks_enough(full) for raw in raws for full in _closed(raw))
    return [*{cell.cell_id: cell for cell in cells}.values()]


def limit_of(cell: RunConfig) -> Limit:
    """The limit of a cell by its strategy's facts; engine, kernel and packages do not matter here."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        return _limit_of(cell, STRATEGIES[cell.strategy])


def _limit_of(cell: RunConfig, facts: Facts) -> Limit:
    refusals = facts.refusals(cell)
    return Limit(
        model=cell.model.name,
        num_heads=cell.model.num_heads,
        num_kv_heads=cell.model.num_kv_heads,
        strategy=cell.strategy,
        sp_degree=cell.sp_degree,
        ulysses_degree=cell.ulysses_degree,
        ring_degree=cell.ring_degree,
        chooses_degrees=_chooses_degrees(cell),
        seq_len=cell.seq_len,
        refusals=tuple(refusals),
        kv_repeats=None if refusals else exchanged_kv_heads(cell) // cell.model.num_kv_heads,
        exchange_bytes=None if refusals else facts.exchange_bytes(cell),
        bytes_factor=None if refusals else _bytes_factor(cell),
    )


def _closed(raw: Raw) -> Iterator[dict[str, Any]]:
    """The request with every choice made: what it names, else all there is."""
    models = [raw["model"]] if "model" in raw else _models_with_numbers()
    usable = [facts.name for facts in STRATEGIES.usable()]
    strategies = (
        [raw["strategy"]] if "strategy" in raw else [read_option("strategy", name) for name in usable]
    )
    requested = raw["sp_degree"]
    requested = requested if isinstance(requested, list) else [requested]
    degrees = [values.whole("sp_degree", each) for each in requested]
    for model in models:
        for strategy in strategies:
            for degree in degrees:
                yield {**raw, "model": model, "strategy": strategy, "sp_degree": degree}


def _models_with_numbers() -> list[Raw]:
    """The options of conf/model/ that are models, not ways to find one; by size of their heads."""
    contents = [read_option("model", name) for name in options("model")]
    models = [content for content in contents if "num_heads" in content]
    return sorted(models, key=lambda model: (model["num_heads"], model["num_kv_heads"], model["name"]))


def _cell_with_ranks_enough(raw: dict[str, Any]) -> RunConfig:
    """The cell on a cluster that has as many ranks as the degree asks for."""
    degree = raw["sp_degree"]
    cluster = {**raw["cluster"], "world_size": degree}
    machine = Machine(gpus=("hypothetical",) * degree, cores=degree, cpu="hypothetical", memory_bytes=0)
    return resolve({**raw, "cluster": cluster}, machine)


def _chooses_degrees(cell: RunConfig) -> bool:
    """Whether the strategy takes all of its ranks as Ulysses and all of them as a ring."""
    extremes = (replace(cell, ulysses_degree=degree) for degree in (1, cell.sp_degree))
    return cell.sp_degree > 1 and not any(map(STRATEGIES[cell.strategy].degree_refusals, extremes))


def _bytes_factor(cell: RunConfig) -> float:
    """Exchanged bytes over those without repeated KV heads, which the formula gives for no real cell.

    Exchanged bytes grow linearly with the KV heads that are sent, so twice as many show what one head costs.
    """
    exchange_bytes = STRATEGIES[cell.strategy].exchange_bytes
    sent_heads, sent_bytes = exchanged_kv_heads(cell), exchange_bytes(cell)
    if sent_heads == cell.model.num_kv_heads:
        return 1.0
    twice = replace(cell, model=replace(cell.model, num_kv_heads=2 * sent_heads))
    head_bytes = (exchange_bytes(twice) - sent_bytes) / sent_heads
    return sent_bytes / (sent_bytes - head_bytes * (sent_heads - cell.model.num_kv_heads))
