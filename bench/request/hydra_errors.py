"""Hydra's own errors in our words: one line that says what was typed, the rule, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from hydra.errors import OverrideParseException

from bench.command import sweep_words
from bench.config import ConfigError
from bench.labels import shown
from bench.request import values
from bench.request.choices import groups, option, options
from bench.request.resolve import all_keys
from bench.strategies import STRATEGIES


def translated(error: Exception) -> str:
    """One line for any error of Hydra or OmegaConf; its own first line where there is no translation."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    chain = "\n".join(_texts(error))
    for pattern, say in TRANSLATIONS:
        match = re.search(pattern, chain)
        if match:
            return say(match)
    own = next((line for line in chain.splitlines() if line.strip()), type(error).__name__).strip()
    return f"{own}; {_see_help()}"


def _see_help() -> str:
    return f"{sweep_words()} --help lists every key and choice"


def _texts(error: BaseException | None) -> list[str]:
    """Messages of an error and of what caused it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return texts


def _unreadable(override: str) -> str:
    word = shown(override)
    key, is_pair, value = "".join(filter(str.isprintable, override)).partition("=")
    if not is_pair:
        return f"{word}: is not of the form key=value; write for example seq_len=8k"
    name = re.sub(r"[^\w.].*", "", key.strip(" +"))
    if name != key.lstrip("+") or value.startswith("="):
        return f"{word}: cannot be read; write {name}={value.strip(' =')}"
    if re.search(r"^,|,,|,$", value):
        return f"{word}: cannot be read; a list is values and commas, as in -m {key}=8k,64k"
    bare = value.replace("'", "").replace('"', "")
    return (
        f"{word}: cannot be read; quote a value with brackets or other special characters, twice for the"
        f" shell: '{key}=\"{bare}\"'"
    )


def _unknown_choice(match: re.Match[str]) -> str:
    group, name = match[1], match[2]
    try:
        option(group, name)
    except ConfigError as error:
        return str(error)
    return f"{group}={name}: cannot be composed; {_see_help()}"


RENAMED: Mapping[str, str] = {"measure.silence_s": "measure.hang_timeout_s"}


def _unknown_key(match: re.Match[str]) -> str:
    key = match[1]
    if key in RENAMED:
        return f"{key}: is now {RENAMED[key]}; write {RENAMED[key]}=..."
    option = key.removeprefix("strategy.")
    owners = [facts.name for facts in STRATEGIES.usable() if option in facts.options]
    if owners:
        return (
            f"{key}: only strategy={' or '.join(owners)} has this option; leave it out for other strategies"
        )
    if key in all_keys():
        group = key.split(".")[0]
        return f"{key}: needs a {group} chosen by name, as in {group}={options(group)[-1]} {key}=..."
    return f"{key}: {values.no_such_key(key, [*all_keys(), *groups()])}"


def _no_variable(match: re.Match[str]) -> str:
    name = match[1]
    return f"${{oc.env:{name}}}: {name} is not set; set it, or give a default: ${{oc.env:{name},value}}"


def _no_such_reference(match: re.Match[str]) -> str:
    return f"${{{match[1]}}}: {values.no_such_key(match[1], all_keys())}"


def _no_such_resolver(match: re.Match[str]) -> str:
    return f"${{{match[1]}:...}}: no such function; write a value, ${{key}} or ${{oc.env:NAME}}"


def _circle(match: re.Match[str]) -> str:
    return f"{match[1]}: refers to itself; write a value"


def _unresolved(match: re.Match[str]) -> str:
    return f"{match[2]}: cannot be filled in ({match[1].strip()}); write a value"


def _secret(match: re.Match[str]) -> str:
    return f"${{oc.env:{match[1]}}}: {match[1]} may be a secret, and records would hold it; write a value"


TRANSLATIONS: Sequence[tuple[str, Callable[[re.Match[str]], str]]] = (
    (r"Could not find '([^/']+)/([^']+)'", _unknown_choice),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"Key '([^']+)' is not in struct", _unknown_key),
    (r"(\S+) may be a secret", _secret),
    (r"Environment variable '([^']*)' not found", _no_variable),
    (r"Interpolation key '([^']*)' not found", _no_such_reference),
    (r"Unsupported interpolation type (\S+)", _no_such_resolver),
    (r"Recursive interpolation detected(?s:.*?)full_key: (\S+)", _circle),
    (r"while resolving interpolation: (.*)(?s:.*?)full_key: (\S+)", _unresolved),
)
