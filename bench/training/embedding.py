"""On a CPU, an embedding that sums its gradient in float32.

torch's own backward adds up the rows of a token in the gradient's dtype there: in bf16 a token that occurs
some hundred times gets no more from the next one, and of 64k tokens a third of the gradient is lost. On a GPU
torch sums in float32 itself, so nothing of this is used there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

NARROW = (torch.bfloat16, torch.float16)


class WideSumEmbedding(nn.Embedding):
    """The library's embedding, but for the sums of its gradient where the weight is bf16 or fp16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the library's name
        if self.weight.dtype not in NARROW:
            return super().forward(input)
        found: Tensor = _Lookup.apply(self.weight, input, self.padding_idx)  # type: ignore[no-untyped-call]
        return found


def sum_embedding_gradient_in_float32(model: PreTrainedModel) -> None:
    """Replace the model's input embedding; its weight, and whatever is tied to it, stays the same tensor."""
    old: Any = model.get_input_embeddings()
    new = WideSumEmbedding(
        old.num_embeddings, old.embedding_dim, padding_idx=old.padding_idx, _weight=old.weight
    )
    new.weight = old.weight
    model.set_input_embeddings(new)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        # Not the weight itself: ZeRO-3 has given it back by the time of backward.
        ctx.num_tokens, ctx.padding_idx = len(weight_VH), -1 if padding_idx is None else padding_idx
        return embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        wide_VH = torch.ops.aten.embedding_dense_backward(
            grad.float(), ids, ctx.num_tokens, ctx.padding_idx, scale_grad_by_freq=False
        )
        return wide_VH.to(grad.dtype), None, None
