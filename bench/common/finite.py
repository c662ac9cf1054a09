"""Functions for nan and infinite numbers, which JSON cannot store and for which comparisons fail."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from msgspec import Struct


def find_not_finite(value: object, place: str) -> Iterator[str]:
    """Yield a text such as `losses.loss[2] is nan` for each number that is not finite.

    Args:
        value: Number, or nested structs, dataclasses, mappings, lists and tuples of numbers.
        place: Name of `value` in the text.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    for part_place, part in _parts(value, place):
        yield from find_not_finite(part, part_place)


def replace_not_finite(value: Any) -> Any:
    """Return a copy of JSON values with None in place of each number that is not finite."""
    if isinstance(value, Mapping):
        return {name: replace_not_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_not_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest error. An error that is not finite counts as larger than all others."""
    return max(errors, key=lambda error: error if math.isfinite(error) else math.inf)


def _parts(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Struct):
        yield from ((f"{place}.{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value):
        yield from ((f"{place}.{field.name}", getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, Mapping):
        yield from ((f"{place}.{name}", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{place}[{number}]", part) for number, part in enumerate(value))
