"""A stand-in for the flash-attn package, on top of any of our kernels.

ring-flash-attn needs four private functions and nothing else of flash-attn. Given them, its algorithms run
unchanged where flash-attn cannot be installed. A real install is never shadowed
when the cell's kernel is `flash_attn_2`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import transformers.modeling_flash_attention_utils as transformers_flash

from bench.attention.flash_attn_functions import (
    backward_with,
    forward_with,
    varlen_backward_with,
    varlen_forward_with,
)
from bench.attention.kernels import KERNELS, Kernel

# ring-flash-attn 0.1.8 asks transformers for a name that is gone since transformers 5.
_GONE_FROM_TRANSFORMERS = "is_flash_attn_greater_or_equal_2_10"


@contextmanager
def flash_attn_from(kernel: Kernel) -> Iterator[None]:
    """While the context lasts, `import ring_flash_attn` succeeds and computes with `kernel`."""
    stand_ins = {} if kernel is KERNELS["flash_attn_2"] else _stand_ins(kernel)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    has_name = hasattr(transformers_flash, _GONE_FROM_TRANSFORMERS)
    if not has_name:
        setattr(transformers_flash, _GONE_FROM_TRANSFORMERS, lambda: True)
    try:
        yield
    finally:
        if not has_name:
            delattr(transformers_flash, _GONE_FROM_TRANSFORMERS)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _stand_ins(kernel: Kernel) -> dict[str, ModuleType]:
    package = ModuleType("flash_attn")
    interface = ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = ModuleSpec("flash_attn", loader=None, is_package=True)
    interface.__spec__ = ModuleSpec("flash_attn.flash_attn_interface", loader=None)
    vars(package)["flash_attn_interface"] = interface
    vars(interface).update(
        _flash_attn_forward=forward_with(kernel),
        _flash_attn_backward=backward_with(kernel),
        _flash_attn_varlen_forward=varlen_forward_with(kernel),
        _flash_attn_varlen_backward=varlen_backward_with(kernel),
    )
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
