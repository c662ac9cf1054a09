"""What holds memory at this moment: every block that Python or an autograd graph can reach, by class.

Made for the moment after a failed allocation: it allocates no tensor, runs no operator and unpacks no saved
tensor (a checkpoint would compute its whole forward again).
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
"""A block that several tensors view has the first of their roles."""
MAX_CLASSES = 10


@dataclass(slots=True)
class _Block:
    """One storage: its size, the largest tensor seen in it, and the first role of any."""

    size_bytes: int
    role: str
    tensor_bytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()


def largest_classes(device_type: str) -> list[BlockClass]:
    """Live blocks on devices of this type, by role, dtype and shape: the classes with most bytes first."""
    found = reachable_objects()
    tensors = [each for each in found if issubclass(type(each), Tensor)]
    optimizers = [each for each in found if issubclass(type(each), torch.optim.Optimizer)]
    blocks: dict[int, _Block] = {}
    for role, held in _by_role(tensors, optimizers):
        for tensor in held:
            # Of a distributed tensor this rank's part.
            _note(blocks, role, getattr(tensor, "_local_tensor", tensor), device_type)
    classes: defaultdict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for block in blocks.values():
        classes[block.role, block.dtype, block.shape].append(block.size_bytes)
    ordered = sorted(classes.items(), key=lambda each: -sum(each[1]))
    return [
        BlockClass(role=role, dtype=dtype, shape=list(shape), count=len(sizes), total_bytes=sum(sizes))
        for (role, dtype, shape), sizes in ordered[:MAX_CLASSES]
    ]


def reachable_objects() -> list[Any]:
    """All that Python's garbage collector knows of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gc.get_objects()


def _by_role(
    tensors: list[Tensor], optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Tensors by what they are for, in the order of ROLES."""
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    shards = [shard for each in parameters if isinstance(shard := getattr(each, "ds_tensor", None), Tensor)]
    yield ROLES[0], [*parameters, *shards]
    yield ROLES[1], [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    yield ROLES[2], _optimizer_state(optimizers)
    yield ROLES[3], [*_saved(tensors), *(each for each in tensors if each.grad_fn is not None)]
    yield ROLES[4], tensors


def _optimizer_state(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Moments, and the copies that an engine lets its optimizer work on."""
    for optimizer in optimizers:
        for state in getattr(optimizer, "state", {}).values():
            yield from (each for each in state.values() if isinstance(each, Tensor))
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]


def _saved(tensors: list[Tensor]) -> Iterator[Tensor]:
    """What the graphs behind these tensors keep for backward."""
    pending: list[Any] = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending += [each for each, _ in node.next_functions if each is not None]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                yield from _raw(node, name)


def _raw(node: Any, name: str) -> Iterator[Tensor]:
    """The tensors behind one saved attribute; none where backward has freed it or a hook has packed it."""
    try:
        packed = getattr(node, name)
        for each in packed if isinstance(packed, tuple | list) else (packed,):
            data = getattr(each, "data", None)
            if isinstance(data, Tensor):
                yield data
    except RuntimeError:
        return


def _note(blocks: dict[int, _Block], role: str, tensor: Tensor, device_type: str) -> None:
    is_fake = isinstance(tensor, FakeTensor)
    if is_fake or tensor.device.type != device_type or tensor.layout != torch.strided:
        return
    try:
        storage = tensor.untyped_storage()
        size_bytes, address = storage.nbytes(), storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return  # a wrapper without memory of its own
    if not size_bytes:
        return
    block = blocks.setdefault(address, _Block(size_bytes, role))
    if tensor.nbytes > block.tensor_bytes:
        block.tensor_bytes, block.shape = tensor.nbytes, tuple(tensor.shape)
        block.dtype = str(tensor.dtype).removeprefix("torch.")
