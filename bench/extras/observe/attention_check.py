"""Comparison of one layer's attention in a real step with float64 at full length.

Letters of shapes: B sequences, N heads, S tokens of a shard, T tokens of the whole sequence, D head size.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.watch import CapturedCall
from bench.extras.observe.attention import AttentionArguments
from bench.extras.observe.objective import SIXTEEN_BIT_LIMIT
from bench.extras.observe.sharding import document_starts_of, places_of
from bench.extras.observe.tokens import ShardTokens
from bench.measure.full_length.comparison import compare
from bench.measure.full_length.section import SAMPLED_ROWS, FullLengthSection
from bench.measure.full_length.shards import AttentionSettings, Shards
from bench.training.models import TORCH_DTYPES

SCORES: Mapping[str, int] = {"cpu": 2**21, "cuda": 2**24}
"""Largest number of scores of a head that a rank computes in float64 at once, by device. All rows of short
sequences are compared, and samples of long ones."""
SPAN_ROWS = 4
"""Number of wrong rows on each rank whose visible keys are looked for."""
SPAN_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-4}
"""Largest relative error of a row that is explained by other visible keys, by dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Ranks that share a sequence, including this rank, and collectives that all of them must call."""

    ranks: Sequence[int]
    process_group: dist.ProcessGroup | None
    """Process group of `ranks`; None if this rank is alone."""
    device: torch.device
    wait_for_all: Callable[[], None]
    """Called before every collective; raises if a rank has stopped observing."""

    def all_gather(self, shard_BSD: Tensor) -> Tensor:
        """Return the shards of all ranks, which have equal lengths, in the order of the ranks: [B, T, D]."""
        if self.process_group is None:
            return shard_BSD
        sent = shard_BSD.contiguous()
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


def compare_attention(
    captured: CapturedCall, facts: AttentionArguments, tokens: ShardTokens, sequence_group: SequenceGroup
) -> FullLengthSection:
    """Compare this rank's part of an attention call with float64; every rank of the group must call this.

    The section has a reason instead of errors if the call is not seen to be plain causal attention.
    """
    x = {name: copy.to_tensor(sequence_group.device) for name, copy in captured.copies.items()}
    states = sequence_group.all_gather_objects((_reason_not_comparable(x, facts, tokens), tokens))
    shards_tokens = [shard for _, shard in states]
    places = next((reason for reason, _ in states if reason is not None), None) or places_of(shards_tokens)
    if isinstance(places, str):
        return _not_made(places)
    # A gradient that was never computed counts as zeros: K and V that were sent as constants have none.
    x = {f"d{name}": torch.zeros_like(x[name]) for name in ("q", "k", "v")} | x
    sequences, heads, length, size = x["q"].shape
    for name in ("out", "dout"):  # some attention functions return the last two dimensions as one
        x[name] = x[name].reshape(sequences, length, heads, size).transpose(1, 2)
    attention = AttentionSettings(DTYPE_NAMES[facts.dtype], facts.scale or size**-0.5, causal=True)
    in_order = torch.tensor(places).argsort()
    local_places = torch.tensor(places).view(len(states), length)[tokens.group_rank]
    starts = torch.tensor(document_starts_of(shards_tokens, places))
    # Outputs in documents without a gradient are padding, whose keys are the loop's own choice.
    has_gradient = x["dout"].ne(0).any(dim=3).any(dim=1).float()[..., None]
    trained = sequence_group.all_gather(has_gradient)[:, in_order.to(has_gradient.device), 0].cpu()
    is_trained = torch.zeros_like(trained).scatter_add(1, starts, trained).gather(1, starts) > 0
    shards = Shards(
        positions=local_places,
        ranks=len(states),
        gather=lambda shard: sequence_group.all_gather(shard)[:, in_order.to(shard.device)],
        all_reduce=sequence_group.all_reduce,
        seed=secrets.randbits(62),  # the loop's random generators must not advance
        first_keys=starts[:, local_places] if bool(starts.any()) else None,
        compared=is_trained[:, local_places],
    )
    rows = max(SAMPLED_ROWS, min(shards.tokens, SCORES[x["q"].device.type] // shards.tokens))
    # Under autocast, attention rounds wider inputs, or does not if it is the loop's own.
    rounded = {name: tensor.to(facts.dtype) for name, tensor in x.items()}
    section = compare(rounded, attention, shards, samples=rows)
    if _is_wrong(section) and any(tensor.dtype != facts.dtype for tensor in x.values()):
        section = compare(x, attention, shards, samples=rows)
    if _is_wrong(section) and shards.first_keys is None and _has_mask_of_its_own(x, attention, shards):
        return _not_made("queries see later or not all earlier keys, by a mask that only the loop knows")
    return section


def _is_wrong(section: FullLengthSection) -> bool:
    return (section.errors["out"] or 0.0) > (section.limits["out"] or 0.0)


def _not_made(reason: str) -> FullLengthSection:
    return FullLengthSection(tokens=0, rows=0, errors={}, limits={}, reason=reason)


def _reason_not_comparable(
    x: Mapping[str, Tensor], facts: AttentionArguments, given: ShardTokens
) -> str | None:
    """Return why this rank's tensors cannot be compared; None if they can."""
    if facts.features:
        return f"attention is not plain causal attention: {', '.join(facts.features)}"
    if "dout" not in x:
        return "attention was not called with gradients"
    if x["dout"].dtype == torch.float16 and not x["dout"].isfinite().all():
        return "the scaled gradient of attention's output overflowed"
    if x["out"].numel() != x["q"].numel():
        return f"attention returned an output of shape {(*x['out'].shape,)} for queries of {(*x['q'].shape,)}"
    queries, keys = x["q"].shape[2], x["k"].shape[2]
    if not queries == keys == given.length:
        return f"attention was given {queries} queries and {keys} keys, but the model {given.length} tokens"
    return None


def _has_mask_of_its_own(x: Mapping[str, Tensor], attention: AttentionSettings, shards: Shards) -> bool:
    """Return whether the worst rows are exact attention to other keys than all earlier ones.

    A range of keys that begins with a shard is no mask: it is what is left if shards are not exchanged. Every
    rank of the group must call this.
    """
    device = x["q"].device
    limit = SPAN_LIMITS.get(attention.dtype, SIXTEEN_BIT_LIMIT)
    with torch.autocast(device.type, enabled=False):
        k_TD, v_TD = (shards.gather(x[name][:, 0])[0].double() for name in ("k", "v"))
        count = min(len(shards.positions), max(SPAN_ROWS, SCORES[device.type] // shards.tokens))
        rows = torch.linspace(0, len(shards.positions) - 1, count).long()
        places = shards.positions[rows].to(device)
        q_RD, out_RD = (x[name][0, 0][rows.to(device)].double() for name in ("q", "out"))
        scores_RT = q_RD @ k_TD.T * attention.scale
        hidden_RT = torch.arange(shards.tokens, device=device) > places[:, None]
        exact_RD = scores_RT.masked_fill(hidden_RT, float("-inf")).softmax(-1) @ v_TD
        errors_R = (out_RD - exact_RD).norm(dim=-1) / exact_RD.norm(dim=-1)
        # Wrong rows, those of them with other keys, and those whose keys begin within a shard.
        counts = torch.zeros(3, device=device)
        for row in errors_R.topk(min(SPAN_ROWS, count)).indices:
            if errors_R[row] > limit:
                place = int(places[row])
                span, error = _visible_span(scores_RT[row], v_TD, out_RD[row], place)
                is_masked = error <= limit and span != range(shards.tokens)  # all keys: not causal at all
                is_within_shard = span.stop != place + 1 or span.start % len(shards.positions) != 0
                counts += torch.tensor([1, is_masked, is_within_shard], device=device)
    wrong, fitting, within_shard = shards.all_reduce(counts).tolist()
    return bool(wrong == fitting and within_shard > 0)


def _visible_span(scores_T: Tensor, v_TD: Tensor, out_D: Tensor, place: int) -> tuple[range, float]:
    """Return the keys that explain a row best, the last up to it or a prefix, and the relative error."""
    weights = (scores_T - scores_T.max()).exp()[:, None]
    terms = torch.cat([weights * v_TD, weights], dim=1)
    after = terms[: place + 1].flip(0).cumsum(0).flip(0)
    sums = torch.cat([after, terms.cumsum(0)[place + 1 :]])
    errors = (sums[:, :-1] / sums[:, -1:] - out_D).norm(dim=-1) / out_D.norm()
    best = int(errors.argmin())
    return range(best, place + 1) if best <= place else range(best + 1), float(errors[best])
