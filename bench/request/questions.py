"""Words of the command line as questions: the axes that say what is to be done, and what may be chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from bench.config import ConfigError
from bench.request.choices import Raw, refuse_no_conf
from bench.request.command_line import readable_by_hydra
from bench.request.composition import composed, words_of
from bench.request.spread import SPREADING, Given
from bench.request.target import PREDICT

NOT_ASKED: Mapping[str, str] = {
    "experiment": "plans cells of its own",
    "lease": "belongs to a sweep",
    "length_step": "belongs to experiment=max_length",
    "mode": "is predict here, and measured records count by themselves",
    "plan": "belongs to a sweep",
    "resume": "belongs to a sweep",
    "sweep_dir": "belongs to a sweep",
}
"""Keys without a meaning where nothing runs, and why."""


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
            reason = NOT_ASKED[override.key_or_group]
            raise ConfigError(f"{override.input_line}: {override.key_or_group} {reason}; leave it out")
    given = {each.key_or_group: _values(each) for each in overrides if each.key_or_group in SPREADING}
    given = {key: values for key, values in given.items() if values != ["auto"]}
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
