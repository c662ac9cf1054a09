"""The user's words, one value at a time: text from the command line or YAML in, a typed value out."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.config import ConfigError, Resume
from bench.labels import LENGTH_UNITS, MAX_SHOWN, shown

MAX_CELLS = 10_000
MAX_WHOLE = 2**40
"""Of tokens and of every other count: seeds and sums over samples stay within 64 bits."""
MAX_SECONDS = 1_000_000
"""Under what the operating system's timers can wait, 2^31 milliseconds."""
SYNONYMS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "gpu": "cuda",
}
"""Common names for values of ours, where similar spelling would suggest none or the wrong one."""
_LENGTH = re.compile(r"([0-9]{1,80})([kKmM]?)")


def tokens(key: str, value: Any) -> int:
    """A length in tokens: `8192`, `8k` (1024 each) or `1m` (1024k)."""
    match = _LENGTH.fullmatch(_text(value))
    count = int(match[1]) * LENGTH_UNITS[match[2].lower()] if match else 0
    if not 1 <= count <= MAX_WHOLE:
        raise ConfigError(
            f"{key}={shown(value)}: a length is a whole number of tokens from 1{_up_to(count)}, with k for"
            f" 1024 or m for 1048576; write for example {key}=8k{_sweep_hint(key, value, '8k,64k')}"
        )
    return count


def whole(key: str, value: Any, *, least: int = 1) -> int:
    """A whole number from `least` to MAX_WHOLE."""
    number = int(_text(value)) if re.fullmatch(r"[0-9]+", _text(value)[:MAX_SHOWN]) else None
    if number is None or not least <= number <= MAX_WHOLE:
        raise ConfigError(
            f"{key}={shown(value)}: must be a whole number from {least}{_up_to(number)}; write for example"
            f" {key}={max(least, 2)}{_sweep_hint(key, value, '2,4')}"
        )
    return number


def seconds(key: str, value: Any, *, or_none: bool = False) -> float:
    """A positive number of seconds, MAX_SECONDS at the most; 0 where there may be `or_none`."""
    if not _is_number(value) or not 0 <= value <= MAX_SECONDS or (value == 0 and not or_none):
        kind = "0 or a positive number" if or_none else "a positive number"
        raise ConfigError(
            f"{key}={shown(value)}: must be {kind} of seconds up to {MAX_SECONDS}; write for example {key}=20"
        )
    return float(value)


def positive(key: str, value: Any, *, example: str, or_zero: bool = False) -> float:
    """A positive, finite number; 0 too where there may be `or_zero`."""
    is_good = _is_number(value) and math.isfinite(value) and (value > 0 or (or_zero and value == 0))
    if not is_good:
        kind = "0 or a positive number" if or_zero else "a positive number"
        raise ConfigError(f"{key}={shown(value)}: must be {kind}; write for example {key}={example}")
    return float(value)


def text(key: str, value: Any) -> str:
    """A name or a path: one line that is not empty."""
    line = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not line.strip() or not line.isprintable():
        raise ConfigError(f"{key}={shown(value)}: must be a line of text; write {key}=... or leave it out")
    return line


def path(key: str, value: Any) -> str | None:
    """A file or folder that is there and can be read; None stays None."""
    if value is None:
        return None
    name = text(key, value)
    try:
        mode = os.R_OK | (os.X_OK if Path(name).is_dir() else 0)
        is_there, is_readable = Path(name).exists(), os.access(name, mode)
        is_endless = is_there and not (Path(name).is_file() or Path(name).is_dir())
    except (OSError, ValueError):
        is_there = is_readable = is_endless = False
    if not is_there:
        raise ConfigError(f"{key}={shown(name)}: no such file or folder; check the path")
    if is_endless:
        raise ConfigError(f"{key}={shown(name)}: is a device, pipe or socket; name a file or folder")
    if not is_readable:
        raise ConfigError(f"{key}={shown(name)}: cannot be read; change its permissions, or name another")
    return name


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={shown(value)}: must be true or false; write {key}=true")
    return value


def resume(key: str, value: Any) -> Resume:
    """NEVER for false, MATCHING for true, ANY for `any`."""
    named = {False: Resume.NEVER, True: Resume.MATCHING, Resume.ANY.value: Resume.ANY}
    if not isinstance(value, bool | str) or value not in named:
        raise ConfigError(f"{key}={shown(value)}: must be true, false or any; write {key}=true")
    return named[value]


def choice(key: str, value: Any, known: Collection[str]) -> str:
    """One of `known`, spelt exactly so."""
    if not isinstance(value, str) or value not in known:
        near = nearest(str(value).lower().removeprefix("torch."), known)
        hint = f"did you mean {key}={near}?" if near else f"write for example {key}={min(known)}"
        raise ConfigError(f"{key}={shown(value)}: must be one of {', '.join(sorted(known))}; {hint}")
    return value


def no_such_key(key: str, known: Collection[str]) -> str:
    """The message about a key that does not exist, with the nearest that does."""
    near = nearest(key, known)
    return f"no such key; did you mean {near}?" if near else "no such key; --help lists them all"


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word that was probably meant, or None."""
    synonym = SYNONYMS.get(word)
    if synonym in known:
        return synonym
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def _up_to(number: int | None) -> str:
    """The upper limit, where it is what was broken."""
    return f" to {MAX_WHOLE}" if number is not None and number > MAX_WHOLE else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""


def _sweep_hint(key: str, value: Any, several: str) -> str:
    is_list = isinstance(value, list) or (isinstance(value, str) and "," in value)
    return f"; for several values add -m: -m {key}={several}" if is_list else ""


def refuse_too_many(factors: Sequence[int]) -> None:
    """Raises ConfigError where these numbers multiply to more than MAX_CELLS."""
    cells = 1
    for factor in factors:
        cells *= factor
        if cells > MAX_CELLS:
            raise ConfigError(
                f"a sweep of {cells} cells or more: at most {MAX_CELLS} are allowed; sweep fewer values"
            )
