"""ring-flash-attn's `llama3_flash_attn_varlen_func`, unchanged, with one call per sequence of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.attention.flash_attn_bridge import package_on
from bench.attention.packed import copy_to_device
from bench.strategies.strategy import Strategy

Boundaries = tuple[Any, ...]
"""Document ends in queries and in keys, longest document of each, and slice of the keys that are needed."""


class Llama3Attention(Strategy):
    def load_package(self) -> None:
        self.package: Any = package_on("ring_flash_attn", self.kernel)
        self.prepared: dict[tuple[tuple[int, ...], bool], Boundaries] = {}

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        outs_SND = self._call_per_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal)
        out_BSND = outs_SND[0][None] if len(outs_SND) == 1 else torch.stack(outs_SND)
        return out_BSND.transpose(1, 2)

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        results = self._call_per_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal, return_attn_probs=True)
        return torch.stack([lse_NS for _, lse_NS, _ in results])

    def _call_per_sequence(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, **keywords: Any
    ) -> list[Any]:
        """Call the package's function, which takes one sequence, for each sequence and return its results.

        A result is the output, [S, N, D]. With `return_attn_probs=True` it is (output, LSE [N, S], None).
        """
        batch, _, shard_len, _ = q_BNSD.shape
        whole = ((shard_len * self.cell.sp_degree,),) * batch
        ends = whole if self.documents is None else self.documents.ends
        results = []
        for q_NSD, k_KSD, v_KSD, sequence_ends in zip(q_BNSD, k_BKSD, v_BKSD, ends, strict=True):
            *boundaries, key_slice = self._boundaries(sequence_ends, causal, q_BNSD.device)
            results.append(
                self.package.llama3_flash_attn_varlen_func(
                    *(x.transpose(0, 1) for x in (q_NSD, k_KSD, v_KSD)),
                    *boundaries,
                    self.cell.number("heads_k_stride"),
                    key_slice,
                    causal=causal,
                    group=self.groups.sequence,
                    **keywords,
                )
            )
        return results

    def _boundaries(self, ends: tuple[int, ...], causal: bool, device: torch.device) -> Boundaries:
        """Return the boundaries for documents that end at `ends`, which the package prepares and we cache.

        The preparation waits for the device, so users of the package also do it once a batch, not in every
        layer.
        """
        if (ends, causal) not in self.prepared:
            cu_seqlens = copy_to_device(torch.tensor([0, *ends], dtype=torch.int32), device)
            self.prepared[ends, causal] = self.package.llama3_flash_attn_prepare_cu_seqlens(
                cu_seqlens, causal, rank=self.groups.sequence_rank, world_size=self.cell.sp_degree
            )
        return self.prepared[ends, causal]

    @contextmanager
    def use_documents(self, documents: Documents | None) -> Iterator[None]:
        """Prepare the boundaries of the documents inside the context, and discard them afterwards."""
        with super().use_documents(documents):
            for ends in () if documents is None else documents.ends:
                self._boundaries(ends, causal=True, device=torch.device(self.cell.cluster.device))
            yield
        if documents is not None:
            self.prepared.clear()


STRATEGY = Llama3Attention
