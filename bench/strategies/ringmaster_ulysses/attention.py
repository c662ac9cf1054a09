"""ringmaster's Ulysses, as it is, around our kernels; and what its strategies share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.flash_attn_bridge import flash_attn_from
from bench.attention.kernels import Kernel, attend
from bench.strategies.strategy import Strategy

Attention = Callable[..., tuple[Tensor, None]]
"""`attention(module, q_BNSD, k_BKSD, v_BKSD, mask, **keywords)`, as transformers calls one."""
IN_TRANSFORMERS: Mapping[str, str] = {
    "flash_attn_2": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
}
"""What transformers calls the kernels that it loads itself: under another name it asks a hub for them.

The second is reached by the bridge, whose functions take what those of the first do: the package passes
`dropout_p`, which FlashAttention-3's own have not.
"""


class Ringmaster(Strategy):
    """A strategy of the package: its function, and the runtime in which it finds its process groups.

    `ringmaster.setup` makes the same of groups of its own, which span all ranks and have torch's deadline.
    """

    backend: ClassVar[str]
    """The package's own word."""

    def load_package(self) -> None:
        from ringmaster import Backend, CPRuntime, LoadBalance, RingmasterConfig, runtime

        cell, groups = self.cell, self.groups
        config = RingmasterConfig(
            cell.sp_degree,
            Backend[self.backend],
            ulysses_size=cell.ulysses_degree,
            ring_size=cell.ring_degree,
            load_balance=LoadBalance(self.load_balance()),
        )
        ulysses, ring = {
            "ULYSSES": (groups.sequence, None),
            "RING": (None, groups.sequence),
            "USP": (groups.ulysses, groups.ring),
        }[self.backend]
        self.module = torch.nn.Module()
        self.set_runtime = runtime.set_runtime
        self.runtime = CPRuntime(config, ulysses, ring, groups.sequence)
        self.function = self.function_of_package()

    def load_balance(self) -> str:
        """The package's own word for how ranks share the causal mask's work."""
        return "none"

    @abstractmethod
    def function_of_package(self) -> Attention:
        """The attention that the package registers with transformers."""

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        self.set_runtime(self.runtime)  # one for all of a process, and other cells may have set theirs
        packing = self.packing
        self.runtime.varlen = packing and (packing.cu_seqlens_q, packing.max_seqlen_q)
        with flash_attn_from(self.kernel):
            out_BSND, _ = self.function(self.module, q_BNSD, k_BKSD, v_BKSD, None, is_causal=causal)
        return out_BSND.transpose(1, 2)


class RingmasterUlyssesAttention(Ringmaster):
    backend = "ULYSSES"

    def function_of_package(self) -> Attention:
        from ringmaster.strategies.ulysses import make_ulysses_attention

        inner = IN_TRANSFORMERS.get(self.kernel.name)
        if inner is None:
            inner = f"bench_{self.kernel.name}"
            ALL_ATTENTION_FUNCTIONS[inner] = attention_on(self.kernel)
        # Where transformers' own attention looks for the kernel's name.
        self.module.config = SimpleNamespace(_attn_implementation=inner)  # type: ignore[assignment]
        function: Attention = make_ulysses_attention(inner)
        return function


def attention_on(kernel: Kernel) -> Attention:
    """Attention of one device as transformers calls it, which the package wraps."""

    def attention(
        module: torch.nn.Module,  # noqa: ARG001
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        mask: Tensor | None,  # noqa: ARG001
        *,
        is_causal: bool,
        **keywords: Any,  # noqa: ARG001  what layers ask for beyond causal attention was refused before
    ) -> tuple[Tensor, None]:
        return attend(q_BNSD, k_BKSD, v_BKSD, kernel=kernel, causal=is_causal).transpose(1, 2), None

    return attention


STRATEGY = RingmasterUlyssesAttention
