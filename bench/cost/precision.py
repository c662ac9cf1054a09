"""How many bytes a number has, by where it stands."""

from __future__ import annotations

from bench.config import DTYPE_BYTES, LOW_PRECISION, RunConfig

FLOAT32_BYTES = 4


def is_autocast(cell: RunConfig) -> bool:
    """Whether weights stay float32, and products cast them and their inputs."""
    return cell.engine.name == "ddp" and cell.dtype in LOW_PRECISION


def stream_bytes(cell: RunConfig) -> int:
    """Of a number between layers."""
    return FLOAT32_BYTES if is_autocast(cell) else DTYPE_BYTES[cell.dtype]


def wide_bytes(cell: RunConfig) -> int:
    """Of a number of the optimizer, or of a sum over ranks."""
    return max(FLOAT32_BYTES, DTYPE_BYTES[cell.dtype])
