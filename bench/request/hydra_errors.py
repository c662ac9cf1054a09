"""Translation of Hydra's errors into one line: the word of the command line, the rule and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hydra.errors import OverrideParseException

from bench.common.command import sweep_command
from bench.common.labels import value_label
from bench.request import values
from bench.request.choices import groups, options, read_option
from bench.request.resolve import all_keys
from bench.strategies import STRATEGIES


def translate_error(error: Exception) -> str:
    """Return one line for any error of Hydra or OmegaConf: its translation, or without one its first line."""
    if isinstance(error, OverrideParseException):
        return _unreadable_word(error.override)
    chain = "\n".join(_error_chain(error))
    for pattern, translation in TRANSLATIONS:
        match = re.search(pattern, chain)
        if match:
            return match.expand(translation) if isinstance(translation, str) else translation(match)
    first_line = next((line for line in chain.splitlines() if line.strip()), type(error).__name__).strip()
    return f"{first_line}; {sweep_command()} --help-all lists every key and choice"


def _error_chain(error: BaseException | None) -> list[str]:
    """Return the messages of an error and of the errors that caused it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return texts


def _unreadable_word(override: str) -> str:
    """Return the message for a word that Hydra cannot parse."""
    word = value_label(override)
    key, is_pair, value = "".join(filter(str.isprintable, override)).partition("=")
    if not is_pair:
        return f"{word}: is not of the form key=value; write for example seq_len=8k"
    name, bare = re.sub(r"[^\w.].*", "", key.strip(" +")), re.sub("^[ =]+|['\"]", "", value)
    return (
        f"{word}: cannot be read; write key=value without spaces, separate several values by commas, and put"
        f" special characters into quotes, twice for the shell: '{name}=\"{bare}\"'"
    )


def _unknown_key(match: re.Match[str]) -> str:
    """Return the message for a key that the composed configuration does not have; group 1 is the key."""
    key = match[1]
    option = key.removeprefix("strategy.")
    owners = [facts.name for facts in STRATEGIES.usable() if option in facts.options]
    if owners:
        return (
            f"{key}: only strategy={' or '.join(owners)} has this option; leave it out for other strategies"
        )
    if key in all_keys():
        group, name = key.split(".")
        option = [option for option in options(group) if name in read_option(group, option)][-1]
        return f"{key}: needs an explicit {group}, as in {group}={option} {key}=..."
    return f"{key}: {values.no_such_key(key, [*all_keys(), *groups()])}"


def _no_such_reference(match: re.Match[str]) -> str:
    return f"${{{match[1]}}}: {values.no_such_key(match[1], all_keys())}"


TRANSLATIONS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"Could not override '([^']+)'", _unknown_key),
    (r"Key '([^']+)' is not in struct", _unknown_key),
    (
        r"(\S+) may be a secret",
        r"${oc.env:\1}: \1 may be a secret, which records would store; write a value",
    ),
    (
        r"Environment variable '([^']*)' not found",
        r"${oc.env:\1}: \1 is not set; set it, or give a default: ${oc.env:\1,value}",
    ),
    (r"Interpolation key '([^']*)' not found", _no_such_reference),
    (
        r"Unsupported interpolation type (\S+)",
        r"${\1:...}: no such function; write a value, ${key} or ${oc.env:NAME}",
    ),
    (r"Recursive interpolation detected(?s:.*?)full_key: (\S+)", r"\1: refers to itself; write a value"),
    (
        r"while resolving interpolation: *(.*?) *\n(?s:.*?)full_key: (\S+)",
        r"\2: cannot be filled in (\1); write a value",
    ),
)
"""Patterns of Hydra's and OmegaConf's messages, each with its translation: a template or a function."""
