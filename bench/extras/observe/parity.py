"""Attention of a real step against float64, at its full length, head by head.

Nothing is called again: what went into one layer's attention and came out of it is gathered from the ranks
that share a sequence, and the exact result is computed beside it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.finite import worst
from bench.common.labels import size_label
from bench.extras.observe.attention import Captured, coarsest
from bench.measure.full_length.comparison import compare as compare_rows
from bench.measure.full_length.section import FullLengthSection
from bench.measure.full_length.shards import AttentionSettings, Shards
from bench.measure.parity.exact import CHUNK, relative_error, whole_attention, whole_attention_flops
from bench.measure.parity.section import ParitySection, limit_of
from bench.training.models import TORCH_DTYPES

BUDGET_FLOPS: Mapping[str, float] = {"cpu": 1e11, "cuda": 1e14}
"""Spent on the exact result and on plain attention in the model's own dtype: seconds on either."""
BLOCKS = 6
"""So many blocks of scores in float64 `whole_attention` holds at once."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp16": 4e-3, "bf16": 2e-2}
"""In 16 bit torch's own kernel on a CPU errs more the longer the sequence."""
DTYPE_WORDS = {dtype: word for word, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Sharers:
    """The ranks that share a sequence, with this one among them."""

    ranks: Sequence[int]
    group: dist.ProcessGroup | None
    """Theirs; None where there is one alone."""
    meet: Callable[[], None]
    """Comes before each collective."""

    def gathered(self, shard_NSD: Tensor) -> Tensor:
        """[N, T, D] in the ranks' order, from the equal shards of all."""
        if self.group is None:
            return shard_NSD
        sent = shard_NSD.contiguous()
        shards = [torch.empty_like(sent) for _ in self.ranks]
        self.meet()
        dist.all_gather(shards, sent, group=self.group)
        return torch.cat(shards, dim=1)

    def summed(self, own: Tensor) -> Tensor:
        """The sum over all."""
        total = own.clone()
        if self.group is not None:
            self.meet()
            dist.all_reduce(total, group=self.group)
        return total

    def gathered_objects(self, own: Any) -> list[Any]:
        """What each has, in their order."""
        if self.group is None:
            return [own]
        gathered: list[Any] = [None] * len(self.ranks)
        self.meet()
        dist.all_gather_object(gathered, own, group=self.group)
        return gathered


def compare(
    captured: Captured, positions: list[int], sharers: Sharers
) -> tuple[ParitySection, FullLengthSection]:
    """This rank's errors: of whole heads, as many as are affordable, and of some rows of all.

    Of whole heads those of the group's first rank, which compares, hold. All of a group must call it.
    `positions` are those of this rank's tokens.
    """
    told = sharers.gathered_objects((_reason(captured, positions), positions, _free_bytes(captured)))
    held = [position for _, each, _ in told for position in each]
    reason = next((reason for reason, *_ in told if reason is not None), None)
    if reason is None and sorted(held) != [*range(len(held))]:
        reason = "the ranks' tokens are not one sequence, such as packed documents"
    if reason is None and len({len(each) for _, each, _ in told}) > 1:
        reason = "the ranks hold shards of different lengths"
    if reason is not None:
        nothing = FullLengthSection(tokens=0, rows=0, errors={}, limits={}, reason=reason)
        return ParitySection(tokens=0, errors={}, limits={}, reason=reason), nothing
    # A gradient that never came back is none at all: K and V that were sent as constants.
    x = {f"d{name}": torch.zeros_like(captured.tensors[name]) for name in ("q", "k", "v")} | captured.tensors
    sequences, heads, tokens, size = x["q"].shape
    for name in ("out", "dout"):  # whose last two dimensions some attention hands back as one
        x[name] = x[name].reshape(sequences, tokens, heads, size).transpose(1, 2)
    attention = AttentionSettings(
        DTYPE_WORDS[coarsest(*x.values())], captured.scale or size**-0.5, causal=True
    )
    order = torch.tensor(held).argsort()
    shards = Shards(
        positions=torch.tensor(positions),
        ranks=len(sharers.ranks),
        whole=lambda shard: sharers.gathered(shard)[:, order.to(shard.device)],
        summed=sharers.summed,
        seed=secrets.randbits(62),  # the loop's own generators stay as they are
    )
    of_heads = _compare_heads(x, attention, shards, sharers, min(free for *_, free in told))
    return of_heads, compare_rows(x, attention, shards)


def _reason(captured: Captured, positions: list[int]) -> str | None:
    """Why this rank's tensors cannot be compared."""
    if captured.reason is not None:
        return captured.reason
    if "dout" not in captured.tensors:
        return "no gradient came back to attention"
    if captured.tensors["dout"].dtype == torch.float16 and not captured.tensors["dout"].isfinite().all():
        return "the scaled gradient that came back to attention overflowed"
    if captured.tensors["out"].numel() != captured.tensors["q"].numel():
        return (
            f"attention made {tuple(captured.tensors['out'].shape)} of {tuple(captured.tensors['q'].shape)}"
        )
    tokens, keys = (captured.tensors[name].shape[2] for name in ("q", "k"))
    if not tokens == keys == len(positions):
        return f"attention was given {tokens} tokens and {keys} keys, the model {len(positions)} tokens"
    return None


def _free_bytes(captured: Captured) -> float:
    """What the GPU of these tensors has left beside the loop's own; of a CPU no limit is known."""
    device = next((x.device for x in captured.tensors.values()), None)
    if device is None or device.type != "cuda":
        return math.inf
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reusable


def _compare_heads(
    x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards, sharers: Sharers, free_bytes: float
) -> ParitySection:
    """As many KV heads as the budget allows, each with the query heads that share it."""
    queries, tokens = x["q"].shape[1] // x["k"].shape[1], shards.tokens
    cost = 2 * whole_attention_flops(queries, tokens, x["q"].shape[3])
    device = x["q"].device.type
    needed_bytes = 8 * queries * tokens * (BLOCKS * CHUNK + 2 * BLOCKS * x["q"].shape[3])
    reason = None
    if needed_bytes > free_bytes:
        reason = f"needs {size_label(needed_bytes)}, and {size_label(int(free_bytes))} of the GPU are free"
    elif cost > BUDGET_FLOPS[device]:
        reason = f"takes {cost:.1e} operations, more than the {BUDGET_FLOPS[device]:.0e} spent on it here"
    if reason is not None:
        reason = f"the exact result of one KV head at {tokens:,} tokens {reason}"
        return ParitySection(tokens=tokens, errors={}, limits={}, reason=reason)
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for head in range(min(x["k"].shape[1], int(BUDGET_FLOPS[device] / cost))):
        whole = {name: shards.whole(shard) for name, shard in _one_head(x, head, queries).items()}
        if dist.get_rank() == sharers.ranks[0]:
            found = _errors(whole, attention)
            errors = {name: worst((error, errors.get(name, 0.0))) for name, (error, _) in found.items()}
            limits = {name: max(limit, limits.get(name, 0.0)) for name, (_, limit) in found.items()}
    return ParitySection(tokens=tokens, errors=errors, limits=limits)


def _one_head(x: Mapping[str, Tensor], head: int, queries: int) -> dict[str, Tensor]:
    """One KV head's part of a sequence, [heads, S, D] each; different heads are of different sequences."""
    sequence = head % len(x["q"])
    several, one = slice(head * queries, (head + 1) * queries), slice(head, head + 1)
    of_keys = ("k", "v", "dk", "dv")
    return {name: tensor[sequence, one if name in of_keys else several] for name, tensor in x.items()}


def _errors(whole: Mapping[str, Tensor], attention: AttentionSettings) -> dict[str, tuple[float, float]]:
    """Error and limit by tensor, as the parity pass has them; gradients have a floor of their own."""
    inputs = whole["q"], whole["k"][0], whole["v"][0], whole["dout"]
    exact = whole_attention(*inputs, attention.scale, torch.float64)
    plain = whole_attention(*inputs, attention.scale, TORCH_DTYPES[attention.dtype])
    found = {}
    for name, each in exact.items():
        floor = 0.0 if name == "out" else GRADIENT_FLOORS.get(attention.dtype, 0.0)
        limit = limit_of(name, attention.dtype, _error(plain[name], each))
        found[name] = _error(whole[name].view_as(each), each), max(limit, floor)
    return found


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative to the exact result's maximum; 1 where that is all zeros and the other is not."""
    if not bool(exact.any()) and bool(found.isfinite().all()):
        return float(bool(found.any()))
    return relative_error(found, exact)
