"""Sums of losses by position add up over the shards of every layout to those of the whole sequence."""

import pytest
import torch

from bench.attention.layouts import LAYOUTS
from bench.measure.losses.section import BOUNDARIES, PARTS
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.position_losses import PositionLosses

TOKENS, RANKS, PADDING = 480, 4, 16


def sums_of(losses, labels, positions):
    recorder = PositionLosses()
    with recorder.recording(TOKENS, parts=PARTS, boundaries=BOUNDARIES):
        recorder.add(losses, labels, positions)
    recorder.add(losses, labels, positions)  # outside of the context
    return recorder.sums


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_shards_are_those_of_the_sequence(layout):
    length = TOKENS + PADDING
    positions, losses = torch.arange(length), torch.rand(length)
    labels = torch.where(positions % 7 == 0, IGNORED_LABEL, positions)
    labels[TOKENS:] = IGNORED_LABEL
    losses = losses.masked_fill(labels == IGNORED_LABEL, 0)
    whole = sums_of(losses, labels, positions)
    pieces = [LAYOUTS[layout].slices(length, RANKS, rank) for rank in range(RANKS)]
    shards = [torch.cat([positions[piece] for piece in own]) for own in pieces]
    total = sum(sums_of(losses[shard], labels[shard], shard[None]) for shard in shards)
    assert torch.allclose(total, whole)
    by_hand = losses[:TOKENS].double().view(PARTS, -1).sum(1)
    assert torch.allclose(whole[0, :PARTS], by_hand)
    ends = torch.arange(TOKENS // BOUNDARIES - 1, TOKENS, TOKENS // BOUNDARIES)
    assert float(whole[0, -1]) == pytest.approx(float(losses[ends].double().sum()))
    assert int(whole[1, -1]) == int((labels[ends] != IGNORED_LABEL).sum())
