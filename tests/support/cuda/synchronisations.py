"""What makes the host wait for a device, found on a CPU, where the waiting itself cannot be seen."""

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
"""A number read from the device, Python's numbers copied to it, and what has to know a result's size."""
READING = ("tolist", "cpu", "numpy")
"""Methods that read a tensor of a CPU without an operator, and on a GPU copy and wait."""


class _Operators(TorchDispatchMode):
    """Also those within a DTensor's own: it handles its operator first, and calls others on plain tensors."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if func in WAITING or (func is aten._to_copy.default and _changes_device(args[0], kwargs)):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _changes_device(tensor, kwargs):
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device).type != tensor.device.type


def _noted(name, found):
    method = getattr(torch.Tensor, name)

    def noted(tensor, *args, **kwargs):
        found.append(name)
        return method(tensor, *args, **kwargs)

    return patch.object(torch.Tensor, name, noted)


@contextmanager
def synchronisations():
    """The names of what waited, in order, while the context lasts."""
    found = []
    with ExitStack() as stack:
        for name in READING:
            stack.enter_context(_noted(name, found))
        stack.enter_context(_Operators(found))
        yield found
