"""Copies from host memory to a device that make no host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(rows: Tensor, device: torch.device) -> Tensor:
    """Host numbers on the device. A GPU copies them from pinned memory in its turn, and the host goes on.

    Rows that share memory, as `expand` makes them, are written out first: torch cannot pin them.
    """
    if device.type == "cpu":
        return rows
    return rows.contiguous().pin_memory().to(device, non_blocking=True)
