"""What a kernel is: attention on one device, returning output and LSE, with an explicit backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.attention.kernel_facts import KERNEL_FACTS

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS` and its backward,
    `backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`.

    `causal` is only ever asked of equally many queries and keys. `native_gqa` kernels take K and V with fewer
    heads than Q; for the others heads are repeated first.
    """

    name: str
    forward: Forward
    backward: Backward
    native_gqa: bool = False

    def available(self, device: str) -> bool:
        """Whether it runs here on "cpu" or "cuda", by its facts; imports no package."""
        facts = KERNEL_FACTS[self.name]
        if device not in facts.dtypes or not facts.is_installed:
            return False
        return device == "cpu" or (torch.cuda.is_available() and _capable(facts.capabilities))


def _capable(capabilities: tuple[int, ...]) -> bool:
    return not capabilities or torch.cuda.get_device_capability()[0] in capabilities
