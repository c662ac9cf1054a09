"""Numbers that are not finite: where they stand, the worst among them, and values without them.

JSON has no such numbers, and every comparison with nan is false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from msgspec import Struct


def not_finite(value: object, place: str) -> Iterator[str]:
    """Every number in dataclasses, mappings and lists that is not finite: `losses.loss[2] is nan`."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    for part_place, part in _parts(value, place):
        yield from not_finite(part, part_place)


def finite(value: Any) -> Any:
    """JSON values with None in place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def worst(errors: Iterable[float]) -> float:
    """The largest; one that is not finite is worse than any that is."""
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
