"""Comparison of one layer's attention in a real step with float64, at full length and head by head.

No layer is called again. The inputs, output and gradients of the step's own call are gathered from the ranks
that share a sequence, and the exact result is computed from the inputs.

Letters of shapes: N heads, S tokens of a shard, T tokens of the whole sequence, D the size of a head.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.finite import largest_error
from bench.common.labels import size_label
from bench.extras.observe.attention import CapturedAttention, coarsest_dtype
from bench.extras.observe.places import Row, document_starts, find_places, order
from bench.measure.full_length.comparison import compare as compare_rows
from bench.measure.full_length.section import FullLengthSection
from bench.measure.full_length.shards import AttentionSettings, Shards
from bench.measure.parity.exact import CHUNK, relative_error, whole_attention, whole_attention_flops
from bench.measure.parity.section import ParitySection, parity_limit
from bench.training.models import TORCH_DTYPES

BUDGET_FLOPS: Mapping[str, float] = {"cpu": 1e11, "cuda": 1e14}
"""Largest number of FLOPs for the exact result and for plain attention in the model's dtype, which takes
seconds on either device."""
SCORE_BLOCKS = 6
"""Number of blocks of float64 scores that `whole_attention` holds at a time."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp16": 4e-3, "bf16": 2e-2}
"""Noise floor of gradients in 16 bit: the error of torch's own attention on the CPU grows with the length."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share a sequence, including this rank, and their collectives.

    Every rank of the group must call the same method.
    """

    ranks: Sequence[int]
    process_group: dist.ProcessGroup | None
    """Process group of `ranks`; None if this rank is alone."""
    wait_for_all: Callable[[], None]
    """Called before every collective; raises if a rank has stopped observing."""

    def all_gather(self, shard_NSD: Tensor) -> Tensor:
        """Return the shards of all ranks, which have equal lengths, in the order of the ranks: [N, T, D]."""
        if self.process_group is None:
            return shard_NSD
        sent = shard_NSD.contiguous()
        shards = [torch.empty_like(sent) for _ in self.ranks]
        self.wait_for_all()
        dist.all_gather(shards, sent, group=self.process_group)
        return torch.cat(shards, dim=1)

    def all_reduce(self, local: Tensor) -> Tensor:
        """Return the sum over all ranks; `local` stays as it is."""
        total = local.clone()
        if self.process_group is not None:
            self.wait_for_all()
            dist.all_reduce(total, group=self.process_group)
        return total

    def all_gather_objects(self, local: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in the order of the ranks."""
        if self.process_group is None:
            return [local]
        gathered: list[Any] = [None] * len(self.ranks)
        self.wait_for_all()
        dist.all_gather_object(gathered, local, group=self.process_group)
        return gathered


@dataclass(frozen=True, slots=True)
class _ShardState:
    """Facts about one rank's captured call that decide what can be compared."""

    reason: str | None
    """Reason why the call cannot be compared; None if it can."""
    positions: Sequence[Row]
    free_bytes: float


def compare_attention(
    captured: CapturedAttention, positions: Sequence[Row], sequence_group: SequenceGroup
) -> tuple[ParitySection, FullLengthSection]:
    """Compare a captured attention call with float64: some whole heads, and some rows of every head.

    BUDGET_FLOPS limits the number of whole heads. They are compared on the group's first rank; the other
    ranks return a section of heads without errors. If a rank's call cannot be compared, both sections have
    the reason instead of errors. Every rank of the group must call this function.

    Args:
        captured: This rank's shard of one attention call.
        positions: Positions of this rank's tokens in every sequence.
        sequence_group: The ranks that hold the other shards.
    """
    local = _ShardState(_reason_not_comparable(captured, positions), positions, _free_bytes(captured))
    states: list[_ShardState] = sequence_group.all_gather_objects(local)
    reason = next((state.reason for state in states if state.reason is not None), None)
    if len({len(state.positions[0]) for state in states}) > 1:
        reason = reason or "the ranks hold shards of different lengths"
    places = None if reason else find_places([state.positions for state in states])
    if places is None:
        reason = reason or "the positions of the ranks' tokens do not determine the order of the sequence"
        no_rows = FullLengthSection(tokens=0, rows=0, errors={}, limits={}, reason=reason)
        return ParitySection(tokens=0, errors={}, limits={}, reason=reason), no_rows
    # A gradient that was never computed counts as zeros: K and V that were sent as constants have none.
    x = {f"d{name}": torch.zeros_like(captured.tensors[name]) for name in ("q", "k", "v")} | captured.tensors
    sequences, heads, tokens, size = x["q"].shape
    for name in ("out", "dout"):  # some attention functions return the last two dimensions as one
        x[name] = x[name].reshape(sequences, tokens, heads, size).transpose(1, 2)
    dtype = DTYPE_NAMES[coarsest_dtype(*x.values())]
    attention = AttentionSettings(dtype, captured.scale or size**-0.5, causal=True)
    in_order = torch.tensor(places).argsort()
    local_places = torch.tensor(places).view(len(states), tokens)[sequence_group.ranks.index(dist.get_rank())]
    starts = _whole_document_starts(states, places)
    shards = Shards(
        positions=local_places,
        ranks=len(sequence_group.ranks),
        gather=lambda shard: sequence_group.all_gather(shard)[:, in_order.to(shard.device)],
        all_reduce=sequence_group.all_reduce,
        seed=secrets.randbits(62),  # the loop's random generators must not advance
        first_keys=None if starts is None else starts.expand(sequences, -1)[:, local_places],
    )
    free_bytes = min(state.free_bytes for state in states)
    is_first_rank = dist.get_rank() == sequence_group.ranks[0]
    heads_section = _compare_heads(x, attention, shards, starts, free_bytes, is_first_rank=is_first_rank)
    return heads_section, compare_rows(x, attention, shards)


def _whole_document_starts(states: Sequence[_ShardState], places: Sequence[int]) -> Tensor | None:
    """Return the start of each token's document in whole sequences, [B, T]; None if all start at 0."""
    rows = ([*itertools.chain(*parts)] for parts in zip(*(state.positions for state in states), strict=True))
    starts = torch.tensor([document_starts(order(row, places)) for row in rows])
    return starts if bool(starts.any()) else None


def _reason_not_comparable(captured: CapturedAttention, positions: Sequence[Row]) -> str | None:
    """Return why this rank's tensors cannot be compared; None if they can."""
    if captured.reason_not_comparable is not None:
        return captured.reason_not_comparable
    tensors = captured.tensors
    if "dout" not in tensors:
        return "the output of attention received no gradient"
    if tensors["dout"].dtype == torch.float16 and not tensors["dout"].isfinite().all():
        return "the scaled gradient of attention's output overflowed"
    if tensors["out"].numel() != tensors["q"].numel():
        shapes = f"{tuple(tensors['out'].shape)} for queries of shape {tuple(tensors['q'].shape)}"
        return f"attention returned an output of shape {shapes}"
    tokens, keys = tensors["q"].shape[2], tensors["k"].shape[2]
    given = len(positions[0])
    if not tokens == keys == given:
        return f"attention was given {tokens} queries and {keys} keys, but the model {given} tokens"
    return None


def _free_bytes(captured: CapturedAttention) -> float:
    """Return the free memory of the tensors' GPU; infinity on a CPU, whose limit is not known."""
    device = next((x.device for x in captured.tensors.values()), None)
    if device is None or device.type != "cuda":
        return math.inf
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reusable


def _compare_heads(
    x: Mapping[str, Tensor],
    attention: AttentionSettings,
    shards: Shards,
    starts: Tensor | None,
    free_bytes: float,
    *,
    is_first_rank: bool,
) -> ParitySection:
    """Compare as many KV heads as the budget allows, each with the query heads that share it.

    If not even one fits into memory and budget, the section has the reason.
    """
    queries_per_kv, tokens, size = x["q"].shape[1] // x["k"].shape[1], shards.tokens, x["q"].shape[3]
    cost, device = 2 * whole_attention_flops(queries_per_kv, tokens, size), x["q"].device.type
    needed_bytes = 8 * queries_per_kv * tokens * SCORE_BLOCKS * (CHUNK + 2 * size)
    reason = None
    if needed_bytes > free_bytes:
        reason = f"needs {size_label(needed_bytes)}, but the GPU has {size_label(int(free_bytes))} free"
    elif cost > BUDGET_FLOPS[device]:
        limit = f"{BUDGET_FLOPS[device]:.0e}"
        reason = f"takes {cost:.1e} operations, more than the {limit} that bench.observe spends on it"
    if reason is not None:
        reason = f"the exact result of one KV head at {tokens:,} tokens {reason}"
        return ParitySection(tokens=tokens, errors={}, limits={}, reason=reason)
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for head in range(min(x["k"].shape[1], int(BUDGET_FLOPS[device] / cost))):
        whole = {name: shards.gather(shard) for name, shard in _one_head(x, head, queries_per_kv).items()}
        if is_first_rank:
            of_head = _head_errors(whole, attention, None if starts is None else starts[head % len(starts)])
            errors = {
                name: largest_error((error, errors.get(name, 0.0))) for name, (error, _) in of_head.items()
            }
            limits = {name: max(limit, limits.get(name, 0.0)) for name, (_, limit) in of_head.items()}
    return ParitySection(tokens=tokens, errors=errors, limits=limits)


def _one_head(x: Mapping[str, Tensor], head: int, queries_per_kv: int) -> dict[str, Tensor]:
    """Return the shards [N, S, D] of one KV head and of its query heads.

    Consecutive heads are taken from different sequences of the batch.
    """
    sequence = head % len(x["q"])
    query_heads, kv_head = slice(head * queries_per_kv, (head + 1) * queries_per_kv), slice(head, head + 1)
    kv_names = ("k", "v", "dk", "dv")
    return {
        name: tensor[sequence, kv_head if name in kv_names else query_heads] for name, tensor in x.items()
    }


def _head_errors(
    whole: Mapping[str, Tensor], attention: AttentionSettings, starts: Tensor | None
) -> dict[str, tuple[float, float]]:
    """Return error and limit of out, dq, dk and dv.

    Limits are set as in the parity pass; for gradients they are at least GRADIENT_FLOORS. `starts` are those
    of each token's document, [T]. Outputs in documents that received no gradient are not compared: they are
    padding, whose keys are the loop's own choice.
    """
    inputs = whole["q"], whole["k"][0], whole["v"][0], whole["dout"]
    first_keys = None if starts is None else starts.to(whole["q"].device)
    exact = whole_attention(*inputs, attention.scale, torch.float64, first_keys)
    control = whole_attention(*inputs, attention.scale, TORCH_DTYPES[attention.dtype], first_keys)
    if first_keys is not None:
        trained = whole["dout"].ne(0).any(dim=-1).any(dim=0)
        is_trained = torch.zeros_like(first_keys).index_add(0, first_keys, trained.to(first_keys.dtype)) > 0
        out = whole["out"].view_as(exact["out"]).double()
        whole = {**whole, "out": out.where(is_trained[first_keys][:, None], exact["out"])}
    errors = {}
    for name, tensor in exact.items():
        floor = 0.0 if name == "out" else GRADIENT_FLOORS.get(attention.dtype, 0.0)
        limit = parity_limit(name, attention.dtype, _relative_error(control[name], tensor))
        errors[name] = _relative_error(whole[name].view_as(tensor), tensor), max(limit, floor)
    return errors


def _relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the error relative to the exact result's maximum; 0 or 1 if the exact result is all zeros."""
    if not bool(exact.any()) and bool(result.isfinite().all()):
        return float(bool(result.any()))
    return relative_error(result, exact)
