"""Records made with other code, torch or device: apart unless somebody asks for them together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pandas as pd

from analysis.frame.archive import MADE_WITH, Archive

ORIGINS = MADE_WITH
"""What may differ in how records were made, as `--mix` calls it, and the column that says it."""


def mixed(archive: Archive, kinds: Collection[str]) -> Archive:
    """The archive with these ORIGINS taken for one: the column names all that are in it."""
    columns = {ORIGINS[kind]: " and ".join(known(archive.frame, kind)) or None for kind in kinds}
    return replace(archive, frame=archive.frame.assign(**columns))


def known(frame: pd.DataFrame, kind: str) -> list[str]:
    """The different values of one of ORIGINS, in alphabetical order; records that do not say it have none."""
    return sorted(map(str, frame[ORIGINS[kind]].dropna().unique()))
