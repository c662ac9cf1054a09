"""Matrix products as a linear layer makes them: forward, and the two of backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from bench.calibrate.case import Call, Case
from bench.calibrate.grid import Grid
from bench.training.models import TORCH_DTYPES


def product_cases(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """[rows, inner] times a weight [columns, inner], and both gradients with their own sizes."""
    for rows in grid.rows:
        for columns in grid.widths:
            for inner in grid.widths:
                if rows * columns * inner > grid.most_product:
                    continue
                make = partial(_forward, rows, columns, inner, dtype, device)
                yield Case("product", dtype, (rows, columns, inner), make)
                make = partial(_input_gradient, rows, inner, columns, dtype, device)
                yield Case("product_input", dtype, (rows, columns, inner), make)
                make = partial(_weight_gradient, columns, inner, rows, dtype, device)
                yield Case("product_weight", dtype, (columns, inner, rows), make)


def _forward(rows: int, columns: int, inner: int, dtype: str, device: torch.device) -> Call:
    x, weight = _random(rows, inner, dtype, device), _random(columns, inner, dtype, device)
    return lambda: linear(x, weight)


def _input_gradient(rows: int, inner: int, columns: int, dtype: str, device: torch.device) -> Call:
    """[rows, inner] times the weight [inner, columns] as it is stored."""
    gradient, weight = _random(rows, inner, dtype, device), _random(inner, columns, dtype, device)
    return lambda: gradient.matmul(weight)


def _weight_gradient(rows: int, columns: int, inner: int, dtype: str, device: torch.device) -> Call:
    """[rows, inner] times [inner, columns]: both stored with `inner`, the tokens, in front."""
    gradient, x = _random(inner, rows, dtype, device), _random(inner, columns, dtype, device)
    return lambda: gradient.t().matmul(x)


def _random(rows: int, columns: int, dtype: str, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device).to(TORCH_DTYPES[dtype])
