"""What one cell of a sweep has measured about rounding, kept for the cells after it as a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from bench.config import RunConfig
from bench.strategies.strategy import Batch

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Kept:
    """Measurements of one model, its weights, dtype, data and device, which the cells of a sweep share."""

    folder: Path | None
    """Where the sweep keeps the folders of its cells; None where nothing is kept."""
    decides: str
    """The same for two cells exactly when they round alike."""

    @classmethod
    def of(cls, folder: Path | None, cell: RunConfig, sequences: Sequence[Batch], *decides: Any) -> Kept:
        """Of the steps that a cell's model takes with these sequences; `decides` is what else matters."""
        model = [asdict(cell.model), cell.loss, cell.seed, cell.dtype, cell.cluster.device]
        fed = [
            tensor for batch in sequences for tensor in (batch.input_ids, batch.labels, batch.position_ids)
        ]
        ends = [str(batch.documents) for batch in sequences]
        told = json.dumps([torch.__version__, model, ends, decides], sort_keys=True, default=str)
        return cls(folder, f"{told} {digest(fed)}")

    def get(self, kind: type[Found], measure: Callable[[], Found], *decides: str) -> Found:
        """What a cell before this one found, or what `measure` finds now; `decides` is what else matters."""
        if self.folder is None:
            return measure()
        name = hashlib.sha256(" ".join([self.decides, *decides]).encode()).hexdigest()[:16]
        path = self.folder / f"rounding_{name}.json"
        try:
            return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind)
        except (OSError, ValueError):  # the first cell, or a file that was cut short
            found = measure()
        with suppress(OSError):  # a disk without room: the next cell measures again
            path.with_suffix(".new").write_text(json.dumps(msgspec.to_builtins(found)), encoding="utf-8")
            path.with_suffix(".new").replace(path)
        return found


def digest(tensors: Sequence[Tensor]) -> str:
    """The same for tensors of the same numbers."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(tensor.shape).encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
