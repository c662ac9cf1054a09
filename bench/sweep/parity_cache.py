"""Parity of one cell stands for all cells of a sweep that differ in nothing it depends on."""

from __future__ import annotations

import json

from bench.config import RunConfig
from bench.passes import Sections
from bench.passes.parity.section import MAX_TOKENS
from bench.record import Record

WITHOUT_EFFECT = frozenset({"seq_len", "engine", "data", "measure", "checkpointing", "hardware"})
"""Fields of a cell that the check never reads; of `seq_len` only what is below MAX_TOKENS."""


class ParityCache:
    """What a sweep has checked so far."""

    def __init__(self) -> None:
        self._checked: dict[str, Sections] = {}

    def find(self, cell: RunConfig) -> Sections:
        """The section of an equal check, by its pass's name; empty where none has passed yet."""
        return self._checked.get(_key(cell), {})

    def keep(self, cell: RunConfig, record: Record) -> None:
        """Remember a check that was passed; a failed one is repeated, to fail again by itself."""
        parity = record.sections["parity"]
        if parity is not None and record.status != "wrong_result":
            self._checked[_key(cell)] = {"parity": parity}


def _key(cell: RunConfig) -> str:
    depends = {name: value for name, value in cell.identity().items() if name not in WITHOUT_EFFECT}
    return json.dumps({**depends, "tokens": min(cell.seq_len, MAX_TOKENS)}, sort_keys=True)
