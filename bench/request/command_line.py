"""The words of the command line, checked before Hydra composes anything, and put into Hydra's grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from bench.common.command import sweep_words
from bench.common.labels import shown
from bench.config import ConfigError
from bench.request import values
from bench.request.choices import groups, option, options
from bench.request.resolve import all_keys
from bench.request.values import MAX_CELLS, refuse_too_many

SWEEP_OPTIONS = ("-m", "--multirun")
PLAN_OPTION, PLAN_WORD = "--plan", "plan=true"
"""The option, and what it is short for."""
SHOWING: Mapping[str, tuple[str, ...]] = {
    "--help": (),
    "-h": (),
    "--help-all": (),
    "--cfg": ("job", "hydra", "all"),
    "-c": ("job", "hydra", "all"),
}
"""Options that show something and run nothing, and the values they take.

Hydra's others would read another configuration, or a pickle.
"""
ONE_A_SWEEP = ("lease", "plan", "resume", "sweep_dir")


def readable_by_hydra(arguments: Sequence[str]) -> list[str]:
    """The same request in Hydra's grammar: options first, and `env.NAME` as a name that may be new.

    Raises ConfigError for an option or a word that no cell can be made of, and Hydra's
    OverrideParseException for a word that cannot be read.
    """
    for word in arguments:
        if not word.isprintable():
            raise ConfigError(
                f"{ascii(word)[1:-1]}: is not of one line and printable; leave those letters out"
            )
    given, asked = _split(arguments)
    is_sweep = given[:1] == ["-m"]
    if is_sweep and len(given) > 1:
        raise ConfigError(f"{' '.join(given)}: {given[1]} shows settings and runs nothing; leave out -m")
    # An experiment is a sweep by itself: its file in conf/ says so to Hydra.
    asks_a_question = any(word.startswith("experiment=") and word != "experiment=none" for word in asked)
    overrides = {word: parsed(word) for word in asked}
    for word, override in overrides.items():
        _refuse_other_than_values(override, word)
        _refuse_sweep(override, word, is_sweep=is_sweep or asks_a_question)
        if override.key_or_group in groups():
            for value in _values(override):
                option(override.key_or_group, value)
    refuse_too_many([len(_values(override)) for override in overrides.values()])
    return [*given, *(f"++{word}" if word.startswith("env.") else word for word in asked)]


def parsed(word: str) -> Override:
    """A word as Hydra's grammar has it.

    Raises Hydra's OverrideParseException for one that it has not, and ConfigError for a number or brackets
    that are too long for Python.
    """
    try:
        return OverridesParser.create().parse_overrides([word])[0]
    except (ValueError, RecursionError) as error:
        too = "too deep" if isinstance(error, RecursionError) else "too long"
        raise ConfigError(f"{shown(word)}: cannot be read, it is {too}; write a shorter value") from None


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What Hydra is to do, `-m` or one option with its value, and the words that are no options."""
    asked: list[str] = []
    shows: list[str] = []
    is_sweep = False
    rest = iter(arguments)
    for word in rest:
        if word in SWEEP_OPTIONS:
            is_sweep = True
        elif word == PLAN_OPTION:
            asked.append(PLAN_WORD)
        elif word.startswith("-"):
            shows = shows or _option(word, rest)
        else:
            asked.append(word)
    return [*(["-m"] if is_sweep else []), *shows], asked


def _option(word: str, rest: Iterator[str]) -> list[str]:
    name, has_value, value = word.partition("=")
    if name in SHOWING:
        allowed = SHOWING[name]
        chosen = value if has_value else next(rest, None)
        return [name, values.choice(name, chosen, allowed)] if allowed else [name]
    if name == PLAN_OPTION:
        raise ConfigError(f"{word}: takes no value; write {PLAN_OPTION}")
    key = name.lstrip("-").replace("-", "_")
    if key in (*all_keys(), *groups()):
        raise ConfigError(f"{word}: a key has no dashes; write {key}={value or '...'}")
    near = values.nearest(name, [*SHOWING, *SWEEP_OPTIONS, PLAN_OPTION])
    if near is None and has_value and (meant := values.nearest(key, [*all_keys(), *groups()])):
        near = f"{meant}={value}"
    hint = f"did you mean {near}?" if near else "keys have no dashes, as in seq_len=8k; --help lists some"
    raise ConfigError(f"{word}: no such option; {hint}")


def _refuse_other_than_values(override: Override, word: str) -> None:
    """Raises ConfigError for a word that would add, delete or move a key: words change values only."""
    key = override.key_or_group
    plain = f"{key}={word.partition('=')[2] or '...'}"
    if not key:
        raise ConfigError(f"{word}: is not of the form key=value; write for example seq_len=8k")
    if key.replace("/", ".").split(".")[0] == "hydra":
        raise ConfigError(f"{word}: Hydra's settings are fixed; sweep_dir=... names the folder, -m sweeps")
    is_added = override.is_add() or override.is_force_add()
    exists = key in (*(known for known in all_keys() if "." not in known), *groups())
    if override.is_delete() or override.package is not None or (is_added and exists):
        raise ConfigError(
            f"{word}: words change values and neither add, delete nor move a key; write {plain}, or nothing"
        )


def _refuse_sweep(override: Override, word: str, *, is_sweep: bool) -> None:
    """Raises ConfigError for several values where there may be one, and for an axis without any."""
    key = override.key_or_group
    if not override.is_sweep_override():
        return
    if not is_sweep:
        raise ConfigError(f"{word}: several values need -m, as in: {sweep_words()} -m {word}")
    if key in ONE_A_SWEEP:
        raise ConfigError(f"{word}: applies to the whole sweep; write one value")
    if not override.is_discrete_sweep() or not _values(override):
        raise ConfigError(f"{word}: has no values; write them with commas, as in seq_len=8k,64k")


def _values(override: Override) -> list[Any]:
    """The values of one word, a little over MAX_CELLS at the most: a range may be longer than memory."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options(override.key_or_group))
    if not override.is_sweep_override():
        return [value]
    try:
        return list(islice(override.sweep_iterator(), MAX_CELLS + 1))
    except (ValueError, HydraException):
        return []
