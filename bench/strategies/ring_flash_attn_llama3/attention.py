"""ring-flash-attn's `llama3_flash_attn_varlen_func`, as it is: one call per sequence of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.attention.flash_attn_bridge import package_on
from bench.attention.packed import sent
from bench.strategies.strategy import Strategy

Places = tuple[Any, ...]
"""What the package prepares: where sequences end among queries and keys, how long they are, which keys."""


class Llama3Attention(Strategy):
    def load_package(self) -> None:
        self.package: Any = package_on("ring_flash_attn", self.kernel)
        self.prepared: dict[tuple[tuple[int, ...], bool], Places] = {}

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        outs_SND = self._by_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal)
        out_BSND = outs_SND[0][None] if len(outs_SND) == 1 else torch.stack(outs_SND)
        return out_BSND.transpose(1, 2)

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        parts = self._by_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal, return_attn_probs=True)
        return torch.stack([lse_NS for _, lse_NS, _ in parts])

    def _by_sequence(self, *qkv: Tensor, causal: bool, **keywords: Any) -> list[Any]:
        """The package's results, one a sequence of the batch: its varlen functions take no batch."""
        batch, _, shard_len, _ = qkv[0].shape
        whole = ((shard_len * self.cell.sp_degree,),) * batch
        ends = whole if self.documents is None else self.documents.ends
        results = []
        for *one, its_ends in zip(*qkv, ends, strict=True):
            *packing, key_slice = self._places(its_ends, causal, qkv[0].device)
            results.append(
                self.package.llama3_flash_attn_varlen_func(
                    *(x.transpose(0, 1) for x in one),
                    *packing,
                    self.cell.number("heads_k_stride"),
                    key_slice,
                    causal=causal,
                    group=self.groups.sequence,
                    **keywords,
                )
            )
        return results

    def _places(self, ends: tuple[int, ...], causal: bool, device: torch.device) -> Places:
        """Prepared once, as the package's users do once a batch: it reads the device and waits for it."""
        if (ends, causal) not in self.prepared:
            boundaries = sent(torch.tensor([0, *ends], dtype=torch.int32), device)
            self.prepared[ends, causal] = self.package.llama3_flash_attn_prepare_cu_seqlens(
                boundaries, causal, rank=self.groups.sequence_rank, world_size=self.cell.sp_degree
            )
        return self.prepared[ends, causal]

    @contextmanager
    def packed(self, documents: Documents | None) -> Iterator[None]:
        """What is prepared for the documents of a batch is forgotten with them."""
        with super().packed(documents):
            for ends in () if documents is None else documents.ends:
                self._places(ends, causal=True, device=torch.device(self.cell.cluster.device))
            yield
        if documents is not None:
            self.prepared.clear()


STRATEGY = Llama3Attention
