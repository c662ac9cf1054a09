"""Types with rules for the numbers in records, which msgspec checks when a record is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

Name = Annotated[str, Meta(min_length=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Times = Annotated[list[PositiveFloat], Meta(min_length=1)]
"""Milliseconds, above zero, of at least one rank or step."""
PerRank = Annotated[list[float], Meta(min_length=1)]
"""One number for each rank."""
SizesPerRank = Annotated[list[NonNegativeInt], Meta(min_length=1)]
"""Bytes, one number for each rank."""


def check_lengths(message: str, *lists: Sequence[object] | None) -> None:
    """Raise ValueError with this message unless all lists that are not None have the same length."""
    if len({len(items) for items in lists if items is not None}) > 1:
        raise ValueError(message)
