"""The leak probe on a model of one's own: which tokens see which."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from bench.measure.probe.leaks import Places, changes_of, leaks, parts_of
from bench.measure.probe.rank import added_up
from bench.measure.probe.section import Moved


def probe(
    model: PreTrainedModel,
    input_ids: Tensor,
    documents: Tensor,
    positions: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    **named: Any,
) -> dict[str, Moved]:
    """What moves when one token changes: of the whole `model`, and of each kind of its layers by itself.

    `input_ids`, `documents` (a number for each document) and `positions` (in the whole sequence, from 0 where
    none are given) are [batch, tokens] of this rank's shard; `group` are the ranks that share the sequences.
    `named` is whatever else the model is called with, such as `position_ids`. Nothing of the model changes.
    Hand it over before FSDP or DeepSpeed takes its parameters apart; every rank of the group must call it.
    """
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    own = Places(documents, positions)
    changes = changes_of(own if group is None else _gathered(own, group))
    counts, _ = leaks(parts_of(model, input_ids, named), own, changes)
    return added_up(counts, group)


def _gathered(own: Places, group: dist.ProcessGroup) -> Places:
    """The places of all ranks' tokens, in any order."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (own.documents.cpu(), own.positions.cpu()), group=group)
    return Places(*(torch.cat(each, dim=1) for each in zip(*everyone, strict=True)))
