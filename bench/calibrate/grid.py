"""The sizes at which things are measured; between them the cost model interpolates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.labels import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of everything."""

    rows: tuple[int, ...]
    """Of matrix products."""
    widths: tuple[int, ...]
    most_product: int
    """Multiply-adds of the largest product."""
    tokens: tuple[int, ...]
    """Of elementwise operations."""
    hidden: tuple[int, ...]
    heads: int
    """Of an attention block: on a GPU enough of them to fill it."""
    head_dims: tuple[int, ...]
    vocabularies: tuple[int, ...]
    most_numbers: int
    """Of the largest tensor that is not attention's."""
    fresh_bytes: int
    """Of memory that is written for the first time: more than the C library keeps."""
    squares: tuple[int, ...]
    """Queries and keys of a causal block."""
    rectangles: tuple[int, ...]
    """Queries of a block without mask; it has half as many keys, as many, and twice as many."""
    messages: tuple[int, ...]
    """Bytes."""
    tensors: tuple[int, ...]
    """How many an optimizer updates."""
    tensor_numbers: tuple[int, ...]

    def sizes(self, all_columns: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Columns and rows of every tensor that is not attention's."""
        for columns in all_columns:
            for rows in self.tokens:
                if rows * columns <= self.most_numbers:
                    yield columns, rows


CPU_GRID = Grid(
    rows=(512, 2048, 8192),
    widths=(16, 64, 256, 1024),
    most_product=2**31,
    tokens=(1024, 4096, 16384, 65536),
    hidden=(64, 256, 1024),
    heads=2,
    head_dims=(16, 32, 64),
    vocabularies=(256, 4096),
    most_numbers=2**22,
    fresh_bytes=64 * MIB,
    squares=(512, 1024, 2048, 4096, 8192, 16384),
    rectangles=(512, 1024, 2048, 4096, 8192),
    messages=(KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB),
    tensors=(2, 12, 48),
    tensor_numbers=(64, 4096, 65536, 2**20),
)
GPU_GRID = Grid(
    rows=(512, 2048, 8192, 32768),
    widths=(512, 2048, 8192),
    most_product=2**40,
    tokens=(1024, 8192, 65536),
    hidden=(512, 4096, 16384),
    heads=16,
    head_dims=(64, 128),
    vocabularies=(32768, 131072),
    most_numbers=2**30,
    fresh_bytes=64 * MIB,
    squares=(1024, 4096, 16384, 65536),
    rectangles=(1024, 4096, 16384, 32768),
    messages=(64 * KIB, MIB, 16 * MIB, 128 * MIB, 512 * MIB),
    tensors=(2, 12, 48),
    tensor_numbers=(4096, 2**20, 2**24),
)
GRIDS: Mapping[str, Grid] = {"cpu": CPU_GRID, "cuda": GPU_GRID}
"""By the ranks' device."""
