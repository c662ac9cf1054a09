"""The full_length pass on a rank: it compares one attention call of the inspected step with float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from bench.attention.watch import CapturedCall
from bench.measure.full_length.comparison import compare
from bench.measure.full_length.section import FullLengthSection, sampled_call
from bench.measure.full_length.shards import AttentionSettings, Shards
from bench.measure.parity.rank import gather_sequence
from bench.measure.rank_pass import Measurement, RankPass, StepRequests
from bench.ranks.memory_limit import without_memory_limit
from bench.strategies.strategy import Strategy


class FullLengthPass(RankPass):
    section: FullLengthSection | None = None

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.captured = CapturedCall(copy_context=without_memory_limit)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        strategy = self.measurement.subject.strategy
        if strategy is not None:
            self.captured.number = sampled_call(strategy.cell)
            self.measurement.watch.captured = self.captured
        try:
            yield
        finally:
            self.measurement.watch.captured = None

    def run(self) -> StepRequests:
        subject = self.measurement.subject
        if subject.strategy is not None:
            with self.measurement.log.run_phase("full_length"), without_memory_limit():
                self.section = _compare_call(
                    self.captured, subject.strategy, subject.device, causal=subject.causal
                )
        yield from ()

    def part(self) -> FullLengthSection | None:
        return self.section


def _compare_call(
    captured: CapturedCall, strategy: Strategy, device: torch.device, *, causal: bool
) -> FullLengthSection:
    """Return errors and limits of the captured call, or a reason for none; every rank must call it."""
    cell = strategy.cell
    if not captured.is_whole:
        reason = "attention was not called with gradients in the inspected step"
        return FullLengthSection(tokens=cell.seq_len, rows=0, errors={}, limits={}, reason=reason)
    attention = AttentionSettings(cell.dtype, cell.model.head_dim**-0.5, causal)
    tensors = captured.tensors_on(device)
    shards = _shards(strategy, tensors.pop("position_ids", None))
    section = compare(tensors, attention, shards)
    return replace(section, call=captured.number)


def _shards(strategy: Strategy, position_ids: Tensor | None) -> Shards:
    """Return this rank's shard in the strategy's layout; its seed differs between cells and ranks.

    With packed documents the first key that a token sees follows from its position in its document.
    """
    cell = strategy.cell

    def sum_over_ranks(local: Tensor) -> Tensor:
        total = local.clone()
        dist.all_reduce(total, group=strategy.groups.sequence)
        return total

    def shard_of(whole_T: Tensor) -> Tensor:
        return torch.cat([whole_T[..., piece] for piece in strategy.slices(cell.padded_len)], dim=-1)

    positions = shard_of(torch.arange(cell.padded_len))
    first_keys = None
    if cell.data.packs:
        assert position_ids is not None
        first_keys = (positions - position_ids.cpu()).expand(cell.batch, -1)
    return Shards(
        positions=positions,
        ranks=cell.sp_degree,
        gather=partial(gather_sequence, strategy),
        all_reduce=sum_over_ranks,
        seed=(int(cell.cell_id, 16) + strategy.groups.rank) % 2**63,
        first_keys=first_keys,
    )


PASS = FullLengthPass
