"""Facts of the environments of all records, as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import to_builtins

from analysis.show.page.record import Pairs, as_text
from bench.common.environment import Environment

MAX_VALUES = 4
"""More different values than this are counted, not listed."""
ONE_BY_ONE = frozenset({"packages", "inherited_env"})
"""Mappings of an environment whose entries are shown by themselves."""


def environment_facts(environments: Iterable[Environment]) -> Pairs:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in map(_one_by_one, environments):
        for key, value in mapping.items():
            values.setdefault(key, {})[as_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _one_by_one(environment: Environment) -> dict[str, Any]:
    """Return the environment with its packages and variables one by one, and equal pairs of GPUs as one."""
    rest = {key: value for key, value in to_builtins(environment).items() if key not in ONE_BY_ONE}
    pairs = {"gpu_topology": environment.gpu_topology, "gpu_p2p": environment.gpu_p2p}
    return {
        **rest,
        **{key: _of_pairs(value) for key, value in pairs.items() if value},
        **{f"package {name}": version for name, version in environment.packages.items()},
        **{f"variable {name}": value for name, value in environment.inherited_env.items()},
    }


def _of_pairs(values: Mapping[str, str]) -> str:
    """`NVLink (all 28 pairs)`, or the pairs of each word: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    alike: dict[str, list[str]] = {}
    for pair, word in values.items():
        alike.setdefault(word, []).append(pair)
    if len(alike) == 1 and len(values) > 1:
        return f"{min(alike)} (all {len(values)} pairs)"
    return ", ".join(f"{word} ({', '.join(pairs)})" for word, pairs in alike.items())
