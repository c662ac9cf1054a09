"""The user's words, one value at a time: text from the command line or YAML in, a typed value out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from typing import Any

from bench.config import ConfigError

MAX_TOKENS = 2**40
_LENGTH = re.compile(r"([0-9]{1,18})([kKmM]?)")
_UNIT = {"": 1, "k": 1024, "m": 1024 * 1024}

NOT_USED = "none"
"""A choice that a cell has no use for, such as the engine of one that trains nothing."""


def tokens(key: str, value: Any) -> int:
    """A length in tokens: `8192`, `8k` (1024 each) or `1m` (1024k)."""
    match = _LENGTH.fullmatch(_text(value))
    count = int(match[1]) * _UNIT[match[2].lower()] if match else 0
    if not 1 <= count <= MAX_TOKENS:
        raise ConfigError(
            f"{key}={_shown(value)}: a length is a whole number of tokens from 1, with k for 1024 or m"
            f" for 1048576; write for example {key}=8k{_sweep_hint(key, value)}"
        )
    return count


def length_label(tokens: int) -> str:
    """`8k` for 8192, `1m` for 1048576, the plain number where it is no whole multiple."""
    for unit, size in (("m", _UNIT["m"]), ("k", _UNIT["k"])):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def whole(key: str, value: Any, *, least: int = 1) -> int:
    """A whole number not below `least`."""
    number = int(_text(value)) if re.fullmatch(r"[0-9]{1,18}", _text(value)) else None
    if number is None or number < least:
        raise ConfigError(
            f"{key}={_shown(value)}: must be a whole number from {least}; write for example"
            f" {key}={max(least, 2)}{_sweep_hint(key, value)}"
        )
    return number


def seconds(key: str, value: Any) -> float:
    """A positive, finite number of seconds."""
    return _positive(key, value, f"a positive number of seconds; write for example {key}=20")


def gib(key: str, value: Any) -> float:
    """A positive, finite number of GiB (2^30 bytes)."""
    return _positive(key, value, f"a positive number of GiB, or null; write for example {key}=0.5")


def _positive(key: str, value: Any, rule: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{key}={_shown(value)}: must be {rule}")
    return float(value)


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={_shown(value)}: must be true or false; write {key}=true")
    return value


def choice(key: str, value: Any, known: Collection[str]) -> str:
    """One of `known`, spelt exactly so."""
    if not isinstance(value, str) or value not in known:
        near = difflib.get_close_matches(str(value).lower(), known, n=1)
        hint = f"did you mean {key}={near[0]}?" if near else f"write for example {key}={min(known)}"
        raise ConfigError(f"{key}={_shown(value)}: must be one of {', '.join(sorted(known))}; {hint}")
    return value


def no_such_key(key: str, known: Collection[str]) -> str:
    """What to say of a key that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"no such key; did you mean {near[0]}?" if near else "no such key; --help lists them all"


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    return repr(value) if isinstance(value, str) and value.strip() != value else str(value)


def _sweep_hint(key: str, value: Any) -> str:
    several = isinstance(value, list) or (isinstance(value, str) and "," in value)
    return f"; for several values add -m: -m {key}=8k,64k" if several else ""
