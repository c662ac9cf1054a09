"""The environments of records in a reader's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.show.tables.record import Pairs, as_text

MAX_VALUES = 4
"""More different values than this are counted, not listed."""
ONE_BY_ONE: Mapping[str, str] = {"packages": "package", "inherited_env": "variable"}
"""Mappings of an environment whose entries are shown by themselves, after this word."""
OF_PAIRS = ("gpu_topology", "gpu_p2p")
"""Mappings with a word for each pair of GPUs."""


def environment_facts(environments: Iterable[Mapping[str, Any]]) -> Pairs:
    """Per key the different values met, as text; counted where they are many."""
    values: dict[str, dict[str, None]] = {}
    for mapping in map(_one_by_one, environments):
        for key, value in mapping.items():
            values.setdefault(key, {})[as_text(value)] = None
    return [
        (key, "; ".join(met) if len(met) <= MAX_VALUES else f"{len(met)} different values")
        for key, met in values.items()
    ]


def _one_by_one(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment with its packages and variables one by one, and pairs of GPUs that are alike as one."""
    rest = {key: value for key, value in environment.items() if key not in ONE_BY_ONE}
    pairs = {key: _of_pairs(environment[key]) for key in OF_PAIRS if environment.get(key)}
    return {**rest, **pairs} | {
        f"{word} {name}": value
        for key, word in ONE_BY_ONE.items()
        for name, value in (environment.get(key) or {}).items()
    }


def _of_pairs(values: Mapping[str, str]) -> str:
    """`NVLink (all 28 pairs)`, or the pairs of each word: `PIX (0-1, 2-3), SYS (0-2, 0-3, 1-2, 1-3)`."""
    alike: dict[str, list[str]] = {}
    for pair, word in values.items():
        alike.setdefault(word, []).append(pair)
    if len(alike) == 1 and len(values) > 1:
        return f"{min(alike)} (all {len(values)} pairs)"
    return ", ".join(f"{word} ({', '.join(pairs)})" for word, pairs in alike.items())
