"""Detection, on a CPU, of operations that would make the host wait for a GPU."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.lift_fresh.default,
    aten.nonzero.default,
    aten.equal.default,
}
"""Operators that read a number from the device, copy Python's numbers to it, or need the size of a result."""
READING = ("tolist", "cpu", "numpy")
"""Methods that read a CPU tensor without an operator, but copy and wait on a GPU."""


class _Operators(TorchDispatchMode):
    """Mode that records waiting operators, also those that a DTensor calls on its local tensors."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func in WAITING or (func is aten._to_copy.default and _changes_device(args[0], kwargs)):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _changes_device(tensor, kwargs):
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device).type != tensor.device.type


def _recording(name, found):
    method = getattr(torch.Tensor, name)

    def record_and_read(tensor, *args, **kwargs):
        found.append(name)
        return method(tensor, *args, **kwargs)

    return patch.object(torch.Tensor, name, record_and_read)


@contextmanager
def synchronisations():
    """Yield a list that collects the names of waiting operations, in order, while the context lasts."""
    found = []
    with ExitStack() as stack:
        for name in READING:
            stack.enter_context(_recording(name, found))
        stack.enter_context(_Operators(found))
        yield found
