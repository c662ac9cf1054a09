"""Measured records of the set-up that a claim is about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.frame.load import config_columns, device_names
from analysis.labels import count_label
from analysis.published.choices import Words
from analysis.published.setup import Setup
from bench.config import NO_MISTAKE
from bench.record import Provenance, Role, Status

FREE = frozenset({"kernel", "trainer"})
"""Settings that a record may have otherwise: sources seldom state them, and they are named."""
NO_ANSWERS = (Role.CONTROL, Role.MISTAKE)
USUAL: Mapping[str, str | int] = {
    "mistake": NO_MISTAKE,
    "cluster.ranks_per_gpu": 1,
    "cluster.memory_limit_gib": 0,
    "engine.leaf": "none",
}
"""Settings without which a record says nothing of its hardware; older records do not have them all."""


def fields_of(setup: Setup, *, but: Collection[str] = ()) -> list[Words]:
    """Values by column that a comparable record has, once for each strategy that is the claim's method."""
    return [_fields({**setup.settings, **method}, but) for method in setup.alternatives]


def fields_of_base(setup: Setup) -> list[Words]:
    """Values by column of the cell that the claim is a ratio to."""
    return [] if setup.base is None else [_fields(setup.base, ())]


def _fields(settings: Words, but: Collection[str]) -> Words:
    """Of attention alone the heads count, not the model that they stand in."""
    alone = settings.get("workload") == "attention"
    left_out = {*FREE, *but, *(("model",) if alone else ())}
    return {key: value for key, value in {"workload": "train", **settings}.items() if key not in left_out}


@dataclass(frozen=True, slots=True)
class Measured:
    """The records of one set-up."""

    frame: pd.DataFrame

    @property
    def statuses(self) -> set[str]:
        return {*self.frame["status"]}

    def lengths(self, status: Status) -> list[int]:
        return [int(length) for length in self.frame.loc[self.frame["status"].eq(status), "seq_len"]]

    def values(self, column: str, per: Callable[[float], float]) -> list[float]:
        """Of every process that ended well."""
        found = self.frame.loc[self.frame["status"].eq(Status.OK), column].dropna()
        return [per(float(value)) for value in found]


@dataclass(frozen=True)
class Comparable:
    """The measured records among some."""

    measured: pd.DataFrame
    frame: pd.DataFrame
    """Those of them on the hardware that they name and with GPUs of their own."""

    @cached_property
    def cells(self) -> pd.DataFrame:
        """All measured ones, one row a configuration."""
        return self.measured.drop_duplicates(config_columns(self.measured))

    @classmethod
    def of(cls, records: pd.DataFrame) -> Comparable:
        answers = records["provenance"].eq(Provenance.MEASURED) & ~records["role"].isin(NO_ANSWERS)
        measured = records[answers]
        counts = _is_on_its_hardware(measured)
        for column, usual in USUAL.items():
            if column in measured:
                counts &= measured[column].isna() | measured[column].eq(usual)
        return cls(measured, measured[counts])

    @cached_property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Of `frame`; comparing an array takes a tenth of what comparing a series does."""
        return {str(name): self.frame[name].to_numpy(dtype=object) for name in self.frame}

    def records(self, alternatives: Sequence[Words]) -> Measured:
        """Those of a set-up, by whichever strategy is its method."""
        chosen = np.zeros(len(self.frame), dtype=bool)
        for fields in alternatives:
            chosen |= self._having(fields)
        return Measured(self.frame[chosen])

    def _having(self, fields: Words) -> np.ndarray[Any, Any]:
        """Which rows of `frame` have these values."""
        found = np.ones(len(self.frame), dtype=bool)
        for column, value in fields.items():
            if not found.any():
                break
            found &= self.columns[column] == value if column in self.columns else False
        return found

    def nearest(self, alternatives: Sequence[Words]) -> str | None:
        """In what the closest record differs; None without any."""
        found = [_differing(self.cells, fields) for fields in alternatives if len(self.measured)]
        if not found:
            return None
        count = count_label(len(self.measured), "measured record")
        _, fewest = min((len(names), names) for names in found)
        return f"the nearest of {count} has {', '.join(fewest) or 'other hardware than it names'}"


def other_settings(row: Mapping[Any, Any], setup: Setup, *, but: Collection[str] = ()) -> list[str]:
    """Return the settings, as `key=value`, in which a record's row is not the cell of a claim.

    The kernel and the trainer are free. The device counts as a setting unless the row is predicted.
    """
    cell, alternatives = pd.DataFrame([row]), fields_of(setup, but=but)
    usual = {key: value for key, value in USUAL.items() if not pd.isna(row.get(key))}
    found = min((_differing(cell, {**fields, **usual}) for fields in alternatives), key=len)
    is_elsewhere = row["provenance"] != Provenance.PREDICTED and not _is_on_its_hardware(cell).all()
    return found or ([f"device={row['device_name']}"] if is_elsewhere else [])


def _differing(cells: pd.DataFrame, fields: Words) -> list[str]:
    """Of the row that shares most values those that it does not share."""
    known = [column for column in fields if column in cells]
    matches = np.column_stack([cells[column].to_numpy(dtype=object) == fields[column] for column in known])
    closest = int(matches.sum(axis=1).argmax())
    row = cells.iloc[closest]
    return [
        f"{column}={_shown(row[column])}"
        for column, matched in zip(known, matches[closest], strict=True)
        if not matched
    ]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_on_its_hardware(frame: pd.DataFrame) -> pd.Series[bool]:
    """Whether the device that ran is the one named: `hardware` is what the request says."""
    known = device_names()
    names = zip(frame["hardware"], frame["device_name"], strict=True)
    return pd.Series(
        [device in known.get(str(hardware), ()) for hardware, device in names], frame.index, dtype=bool
    )
