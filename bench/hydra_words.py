"""Hydra's own errors in our words: one line that says what was typed, the rule, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hydra.errors import OverrideParseException

from bench import words
from bench.conf_files import groups, options
from bench.config import ConfigError
from bench.resolve import all_keys
from bench.strategies import STRATEGIES


def translated(error: Exception) -> str:
    """One line for any error of Hydra or OmegaConf; its own first line where none of ours fits."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    chain = "\n".join(_texts(error))
    for pattern, say in TRANSLATIONS:
        match = re.search(pattern, chain)
        if match:
            return say(match)
    return next((line for line in chain.splitlines() if line.strip()), type(error).__name__).strip()


def _texts(error: BaseException | None) -> list[str]:
    """Messages of an error and of what caused it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return texts


def _unreadable(override: str) -> str:
    if "=" not in override:
        return f"{override}: is no key=value; write for example seq_len=8k"
    return f"{override}: cannot be read; quote a value that holds spaces, brackets or commas"


def _ambiguous(match: re.Match[str]) -> str:
    return f"{match[1]}: several values need -m, as in: python run_sweep.py -m {match[1]}"


def _unknown_choice(match: re.Match[str]) -> str:
    group, name = match[1], match[2]
    try:
        words.choice(group, name, options(group))
    except ConfigError as error:
        return str(error)
    return f"{group}={name}: cannot be composed"


def _unknown_key(match: re.Match[str]) -> str:
    key = match[1]
    owners = [name for name, facts in STRATEGIES.items() if key.removeprefix("strategy.") in facts.options]
    if owners:
        return f"{key}: only strategy={' or '.join(owners)} has this choice; leave it out for others"
    if key in all_keys():
        group = key.split(".")[0]
        return f"{key}: needs a {group} chosen by name, as in {group}={options(group)[-1]} {key}=..."
    return f"{key}: {words.no_such_key(key, [*all_keys(), *groups()])}"


TRANSLATIONS: Sequence[tuple[str, Callable[[re.Match[str]], str]]] = (
    (r"Ambiguous value for argument '([^']*)'", _ambiguous),
    (r"Could not find '([^/']+)/([^']+)'", _unknown_choice),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"Key '([^']+)' is not in struct", _unknown_key),
)
