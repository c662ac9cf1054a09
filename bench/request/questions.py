"""Words of the command line as questions: what is to be done, and every way to spread that over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from bench.config import ConfigError, RunConfig
from bench.environment import Machine
from bench.request import values
from bench.request.choices import Raw, read_option, refuse_no_conf
from bench.request.command_line import readable_by_hydra
from bench.request.composition import composed, words_of
from bench.request.placement import place
from bench.request.resolve import resolve
from bench.request.target import PREDICT, target_machine
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts

NOT_ASKED = ("experiment", "lease", "length_step", "mode", "plan", "resume", "sweep_dir")
"""Keys without a meaning where nothing runs: they belong to a sweep, and `mode` is predict."""
SPREADING = ("strategy", "layout", "sp_degree", "ulysses_degree", "dp_shard")
"""Keys that say how, and not what: each that nobody gave a value is open."""
Given = Mapping[str, Sequence[Any]]
"""The values that may be taken, by keys of SPREADING; all where a key is missing."""


@dataclass(frozen=True, slots=True)
class Question:
    """One piece of work whose best strategy is asked for."""

    words: tuple[str, ...]
    """As they were typed, without those that say how."""
    raw: Raw
    """The whole request; its strategy is one of those that may be chosen."""
    given: Given


def questions(words: Sequence[str]) -> list[Question]:
    """One for every combination of the values that say what is to be done; `strategy` and degrees say how.

    Raises ConfigError for a word that no cell can be made of, and Hydra's errors for one that is not known.
    """
    refuse_no_conf()
    readable_by_hydra(["-m", *words])
    overrides = [OverridesParser.create().parse_overrides([word])[0] for word in words]
    for override in overrides:
        if override.key_or_group in NOT_ASKED:
            raise ConfigError(f"{override.input_line}: nothing runs here, mode is predict; leave it out")
    given = {each.key_or_group: _values(each) for each in overrides if each.key_or_group in SPREADING}
    given = {key: its for key, its in given.items() if its != ["auto"]}
    strategy = [f"strategy={given['strategy'][0]}"] if "strategy" in given else []
    axes = [words_of(each) for each in overrides if each.key_or_group not in SPREADING]
    return [
        Question(chosen, composed(f"mode={PREDICT}", *strategy, *map(_new_where_env, chosen)), given)
        for chosen in product(*axes)
    ]


def _values(override: Override) -> list[Any]:
    return [*override.sweep_iterator()] if override.is_sweep_override() else [override.value()]


def _new_where_env(word: str) -> str:
    return f"++{word}" if word.startswith("env.") else word


def spread(raw: Raw, given: Given, machine: Machine) -> list[RunConfig]:
    """The cells that do the work of `raw`, legal or not; each once.

    sp_degree is every divisor of the number of ranks, the rest is data-parallel; ulysses_degree of a hybrid
    is what makes it one. Raises ConfigError for a bad value.
    """
    ranks = place(raw["cluster"], target_machine(raw, machine)).world_size
    cells = (
        resolve({**raw, **choice}, machine)
        for name in given.get(
            "strategy", [facts.name for facts in STRATEGIES.usable() if not facts.is_optional]
        )
        for choice in _choices(raw, STRATEGIES[values.choice("strategy", name, STRATEGIES)], ranks, given)
    )
    return [*{cell.cell_id: cell for cell in cells}.values()]


def _choices(raw: Raw, facts: Facts, ranks: int, given: Given) -> Iterator[dict[str, Any]]:
    """What stands in place of the request's own words, for one strategy."""
    own = raw["strategy"]
    strategy = own if own["name"] == facts.name else read_option("strategy", facts.name)
    layouts = given.get("layout", ["auto"]) if len(facts.layouts) > 1 else ["auto"]
    left = max(1, ranks // values.whole("dp_replicate", raw["dp_replicate"]))
    if not facts.shares_sequences:
        shard = given.get("dp_shard", [left])
        yield from ({"strategy": strategy, "layout": "auto", "dp_shard": each} for each in shard)
        return
    for layout in layouts:
        for degree, shard in _degrees(left, given):
            for ulysses in _ulysses_degrees(facts, degree, given):
                yield {
                    "strategy": strategy, "layout": layout, "sp_degree": degree, "dp_shard": shard,
                    "ulysses_degree": ulysses,
                }  # fmt: skip


def _degrees(ranks: int, given: Given) -> Iterator[tuple[Any, Any]]:
    """sp_degree and dp_shard; a group of one rank shares nothing, so it is left out where there are more."""
    every = [degree for degree in divisors(ranks) if degree > 1] or [1]
    for degree in given.get("sp_degree", every):
        known = values.whole("sp_degree", degree) if degree != "auto" else ranks
        fits = ranks // known if known <= ranks else 1
        for shard in given.get("dp_shard", [fits]):
            if "sp_degree" in given or known * values.whole("dp_shard", shard) == ranks:
                yield known, shard


def _ulysses_degrees(facts: Facts, sp_degree: int, given: Given) -> Sequence[Any]:
    """Of a hybrid those given, or all between a ring and Ulysses alone; what it is, of the others."""
    if not facts.is_hybrid:
        return ["auto"]
    return given.get("ulysses_degree", [each for each in divisors(sp_degree) if 1 < each < sp_degree])


def divisors(number: int) -> list[int]:
    """Ascending, 1 and the number among them."""
    return [each for each in range(1, number + 1) if number % each == 0]
