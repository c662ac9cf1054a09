"""ringmaster's Ulysses, as it is, around our kernels; and what its strategies share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.attention.flash_attn_bridge import flash_attn_from
from bench.attention.kernels import Kernel, attend
from bench.config import RunConfig
from bench.ranks.groups import RankGroups
from bench.strategies.facts import Facts
from bench.strategies.shipped import parts_of_package
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

    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        self.module = torch.nn.Module()
        with parts_of_package(facts):
            from ringmaster import runtime

            self.set_runtime = runtime.set_runtime
            self.runtime = self.runtime_of_package()
            self.function: Attention = self.function_of_package()

    @abstractmethod
    def runtime_of_package(self) -> Any:
        """The package's configuration and process groups."""

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
    def runtime_of_package(self) -> Any:
        from ringmaster import Backend, CPRuntime, RingmasterConfig

        degree = self.cell.sp_degree
        config = RingmasterConfig(degree, Backend.ULYSSES, ulysses_size=degree, ring_size=1)
        return CPRuntime(config, ulysses_group=self.groups.sequence, cp_group=self.groups.sequence)

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
