"""Files in which a cell of a sweep keeps measured rounding errors for later cells."""

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
from bench.environment import installed, sources_digest
from bench.strategies.strategy import Batch

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Kept:
    """Measurements that cells of one model, its weights, dtype, data and device share."""

    folder: Path | None
    """Where the sweep keeps them; None where nothing is kept."""
    decides: str
    """A text that is equal for two cells exactly when they round alike."""

    @classmethod
    def of(cls, folder: Path | None, cell: RunConfig, sequences: Sequence[Batch], *decides: Any) -> Kept:
        """For steps of the cell's model with these sequences; `decides` is what else matters."""
        model = [asdict(cell.model), cell.loss, cell.seed, cell.dtype, cell.cluster.device]
        fed = [
            tensor for batch in sequences for tensor in (batch.input_ids, batch.labels, batch.position_ids)
        ]
        ends = [str(batch.documents) for batch in sequences]
        made_by = [sources_digest(), torch.__version__, installed("transformers"), _device_name(cell)]
        told = json.dumps([made_by, model, ends, decides], sort_keys=True, default=str)
        return cls(folder, f"{told} {digest(fed)}")

    def get(self, kind: type[Found], measure: Callable[[], Found], *decides: str) -> Found:
        """What an earlier cell measured, or what `measure` returns now; `decides` is what else matters."""
        if self.folder is None:
            return measure()
        name = hashlib.sha256(" ".join([self.decides, *decides]).encode()).hexdigest()[:16]
        path = self.folder / f"{name}.json"
        try:
            return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), kind)
        except (OSError, ValueError):  # the first cell, or a file that was cut short
            found = measure()
        with suppress(OSError):  # a disk without room: the next cell measures again
            self.folder.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_text(json.dumps(msgspec.to_builtins(found)), encoding="utf-8")
            path.with_suffix(".new").replace(path)
        return found


def _device_name(cell: RunConfig) -> str:
    return torch.cuda.get_device_name() if cell.cluster.device == "cuda" else "cpu"


def digest(tensors: Sequence[Tensor]) -> str:
    """A hash of the tensors' shapes and numbers."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(tensor.shape).encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
