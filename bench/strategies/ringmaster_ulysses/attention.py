"""ringmaster's Ulysses, unchanged, around the cell's kernel; base class of the package's strategies."""

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
"""Function of transformers' attention interface, `(module, q_BNSD, k_BKSD, v_BKSD, mask, **keywords)`."""
TRANSFORMERS_NAMES: Mapping[str, str] = {
    "flash_attn_2": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
}
"""transformers' names of the kernels that it loads from installed packages, by our names.

transformers looks up any other name on the Hugging Face hub.

`flash_attention_3` goes through a stand-in with the arguments of FlashAttention-2, because the package passes
`dropout_p`, which FlashAttention-3 does not accept.
"""


class Ringmaster(Strategy):
    """Base class of ringmaster's strategies, with the runtime from which the package reads process groups.

    `ringmaster.setup` is not called: it would create the runtime from new groups of all ranks, with torch's
    timeout instead of ours.
    """

    backend: ClassVar[str]
    """Name of the strategy in the package."""

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
        self.function = self.make_function()

    def load_balance(self) -> str:
        """Return the value of the package's setting `load_balance`."""
        return "none"

    @abstractmethod
    def make_function(self) -> Attention:
        """Return the attention function that the package registers with transformers."""

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        self.set_runtime(self.runtime)  # global in the process, where other cells may have set another
        packing = self.packing
        self.runtime.varlen = packing and (packing.cu_seqlens_q, packing.max_seqlen_q)
        with flash_attn_from(self.kernel):
            out_BSND, _ = self.function(self.module, q_BNSD, k_BKSD, v_BKSD, None, is_causal=causal)
        return out_BSND.transpose(1, 2)


class RingmasterUlyssesAttention(Ringmaster):
    backend = "ULYSSES"

    def make_function(self) -> Attention:
        from ringmaster.strategies.ulysses import make_ulysses_attention

        inner = TRANSFORMERS_NAMES.get(self.kernel.name)
        if inner is None:
            inner = f"bench_{self.kernel.name}"
            ALL_ATTENTION_FUNCTIONS[inner] = kernel_attention(self.kernel)
        # transformers reads the kernel's name from the module's config.
        self.module.config = SimpleNamespace(_attn_implementation=inner)  # type: ignore[assignment]
        function: Attention = make_ulysses_attention(inner)
        return function


def kernel_attention(kernel: Kernel) -> Attention:
    """Return a kernel as a function of transformers' attention interface, for the package to wrap."""

    def attention(
        module: torch.nn.Module,  # noqa: ARG001
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        mask: Tensor | None,  # noqa: ARG001
        *,
        is_causal: bool,
        **keywords: Any,  # noqa: ARG001  requests beyond causal attention were refused before
    ) -> tuple[Tensor, None]:
        return attend(q_BNSD, k_BKSD, v_BKSD, kernel=kernel, causal=is_causal).transpose(1, 2), None

    return attention


STRATEGY = RingmasterUlyssesAttention
