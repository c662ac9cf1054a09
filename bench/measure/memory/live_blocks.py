"""Live blocks of tensor memory that Python or an autograd graph can reach, by role, dtype and shape.

The code runs after a failed allocation. It therefore allocates no tensor and runs no operator. It unpacks no
saved tensor either, because unpacking runs the forward of a checkpointed layer again.
"""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bench.measure.memory.section import BlockClass

ROLES = ("parameter", "gradient", "optimizer state", "activation", "other")
"""Roles in order of precedence: a block that several tensors view has the first of their roles."""
MAX_CLASSES = 10
"""Largest number of classes of blocks that are reported."""


@dataclass(slots=True)
class _LiveBlock:
    """Storage with its role, and the dtype and shape of the largest tensor that views it."""

    size_bytes: int
    role: str
    tensor_bytes: int = 0
    """Size of the largest tensor."""
    dtype: str = ""
    shape: tuple[int, ...] = ()


def largest_block_classes(device_type: str) -> list[BlockClass]:
    """Return at most MAX_CLASSES classes of live blocks on a type of device, in falling order of their bytes.

    The blocks of a class have equal role, dtype and shape.
    """
    objects = reachable_objects()
    tensors = [item for item in objects if issubclass(type(item), Tensor)]
    optimizers = [item for item in objects if issubclass(type(item), torch.optim.Optimizer)]
    blocks: dict[int, _LiveBlock] = {}
    for role, role_tensors in _tensors_by_role(tensors, optimizers):
        for tensor in role_tensors:
            # Of a distributed tensor only this rank's shard counts.
            _add_block(blocks, role, getattr(tensor, "_local_tensor", tensor), device_type)
    classes: defaultdict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for block in blocks.values():
        classes[block.role, block.dtype, block.shape].append(block.size_bytes)
    ordered = sorted(classes.items(), key=lambda item: -sum(item[1]))
    return [
        BlockClass(role=role, dtype=dtype, shape=list(shape), count=len(sizes), total_bytes=sum(sizes))
        for (role, dtype, shape), sizes in ordered[:MAX_CLASSES]
    ]


def reachable_objects() -> list[Any]:
    """Return all objects that Python's garbage collector tracks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gc.get_objects()


def _tensors_by_role(
    tensors: list[Tensor], optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield each role with its tensors, in the order of ROLES; a tensor may have several roles."""
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    zero3_shards = [shard for p in parameters if isinstance(shard := getattr(p, "ds_tensor", None), Tensor)]
    yield ROLES[0], [*parameters, *zero3_shards]
    yield ROLES[1], [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    yield ROLES[2], _optimizer_state(optimizers)
    yield ROLES[3], [*_saved_tensors(tensors), *(tensor for tensor in tensors if tensor.grad_fn is not None)]
    yield ROLES[4], tensors


def _optimizer_state(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the optimizers' moments, and the copies of parameters that an engine gives to its optimizer."""
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]


def _saved_tensors(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that the autograd graphs of `tensors` save for backward."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        pending += [successor for successor, _ in node.next_functions if successor is not None]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                yield from _raw_tensors(node, name)


def _raw_tensors(node: Any, name: str) -> Iterator[Tensor]:
    """Yield the tensors of one saved attribute; none if backward has freed it or a hook has packed it."""
    try:
        packed = getattr(node, name)
        for saved in packed if isinstance(packed, tuple | list) else (packed,):
            data = getattr(saved, "data", None)
            if isinstance(data, Tensor):
                yield data
    except RuntimeError:
        return


def _add_block(blocks: dict[int, _LiveBlock], role: str, tensor: Tensor, device_type: str) -> None:
    """Add the storage of a tensor to `blocks`, by address; skip other devices and tensors without storage."""
    is_fake = isinstance(tensor, FakeTensor)
    if is_fake or tensor.device.type != device_type or tensor.layout != torch.strided:
        return
    try:
        storage = tensor.untyped_storage()
        size_bytes, address = storage.nbytes(), storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return  # a wrapper subclass has no storage
    if not size_bytes:
        return
    block = blocks.setdefault(address, _LiveBlock(size_bytes, role))
    if tensor.nbytes > block.tensor_bytes:
        block.tensor_bytes, block.shape = tensor.nbytes, tuple(tensor.shape)
        block.dtype = str(tensor.dtype).removeprefix("torch.")
