"""Faults at rank boundaries, in positions and in blocks show in the loss by position or in the scores."""

import json
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from msgspec import convert, to_builtins
from torch.nn.functional import pad

from bench.measure.losses.rank import _recording_positions, collect_position_losses
from bench.measure.losses.section import LossByPosition
from bench.measure.quality.rank import score_questions
from bench.measure.quality.section import QualitySection
from bench.measure.workloads import train
from bench.record.position_agreement import match_positions
from bench.record.quality_agreement import match_quality
from bench.record.trajectory_noise import LIMITS
from bench.strategies.ring import attention as ring
from bench.strategies.strategy import IGNORED_LABEL, Strategy
from tests.support.cells import make_cell
from tests.support.many_cells import CELLS, built_workloads, results_of_cells

COMMON = (
    "model=qwen3_nano", "model.num_layers=2", "model.init_std=0.1", "model.rope_theta=1e4",
    "model.trained_len=64", "model.rope_scaling=dynamic", "model.rope_factor=4",
    "seq_len=512", "dtype=fp32", "engine=ddp", "quality.questions=10",
)  # fmt: skip


@contextmanager
def labels_shifted_in_shards():
    """Shift labels within each shard, so that the last label of a shard does not count."""
    right = Strategy.shard

    def shard(self, batch):
        own = right(self, batch)
        labels = pad(own.input_ids[:, 1:], (0, 1), value=IGNORED_LABEL)
        return replace(own, labels=labels.masked_fill(own.labels == IGNORED_LABEL, IGNORED_LABEL))

    with patch.object(Strategy, "shard", shard):
        yield


@contextmanager
def positions_of_the_shard():
    """Count positions from 0 on every rank."""
    right = Strategy.shard

    def shard(self, batch):
        own = right(self, batch)
        return replace(own, position_ids=torch.arange(own.input_ids.shape[1]).expand_as(own.position_ids))

    with patch.object(Strategy, "shard", shard):
        yield


@contextmanager
def stale_block():
    """Compute every received block of a ring with the keys and values of the local one."""

    def rotate(kv, group):
        arriving = ring_rotate(kv, group)
        wait = arriving.wait
        arriving_kv = kv.clone()

        class Stale:
            def wait(self):
                wait()
                return (arriving_kv,)

        return Stale()

    ring_rotate = ring.rotate
    with patch.object(ring, "rotate", rotate):
        yield


@contextmanager
def dropped_last_block():
    """Leave out the tiles of the last ring step."""
    right = ring.RingContext.tiles

    def tiles(self, shard_len, source):
        return () if source == self.sources()[-1] else right(self, shard_len, source)

    with patch.object(ring.RingContext, "tiles", tiles):
        yield


@contextmanager
def scaling_by_the_shard():
    """Choose the rotary frequencies for the length of a shard."""
    right = train.empty_model

    def empty_model(config, *, attention_name, max_positions):
        return right(config, attention_name=attention_name, max_positions=max_positions // 2)

    with patch.object(train, "empty_model", empty_model):
        yield


FAULTS = {
    "boundary label": labels_shifted_in_shards,
    "positions by rank": positions_of_the_shard,
    "stale block": stale_block,
    "dropped last block": dropped_last_block,
    "local RoPE scaling": scaling_by_the_shard,
}
FOUND_BY = {
    "boundary label": {"loss"},
    "positions by rank": {"loss", "scores"},
    "stale block": {"loss", "scores"},
    "dropped last block": {"loss", "scores"},
    "local RoPE scaling": {"loss", "scores"},
}
"""Checks that find each fault. The answers of the questions are no labels at the end of a shard."""
REFERENCE, RIGHT = "local", "right"


def measure(job, log):
    """Report in a rank the scores and the losses by position of every cell, with the fault of its name."""
    results, workloads = {}, built_workloads(job, log)
    for name in json.loads((job.folder / CELLS).read_text()):
        with FAULTS.get(name, nullcontext)():
            _, workload = next(workloads)
            trainer = workload.trainer
            quality = score_questions(trainer)
            with _recording_positions(trainer):
                trainer.step(0, trainer.cell.padded_len)
            results[name] = to_builtins((quality, collect_position_losses(trainer)))
    assert next(workloads, None) is None
    return {"results": results}


@pytest.fixture(scope="module")
def measured(launcher, tmp_path_factory):
    """Return the scores and losses of rank 0 for the reference, the right ring and every fault."""
    cells = {REFERENCE: make_cell(*COMMON, "strategy=local", "cluster.world_size=2", "dp_shard=1")}
    ring_cell = make_cell(*COMMON, "strategy=ring", "layout=contiguous", "cluster.world_size=2")
    cells |= dict.fromkeys((RIGHT, *FAULTS), ring_cell)
    results = results_of_cells(launcher, tmp_path_factory.mktemp("faults"), cells, measure)
    assert all(isinstance(ranks, list) for ranks in results.values()), results
    return {name: convert(ranks[0], tuple[QualitySection, LossByPosition]) for name, ranks in results.items()}


def found_by(measured, name):
    """Return which of the two comparisons with the reference finds a difference."""
    (quality, losses), (expected_quality, expected_losses) = measured[name], measured[REFERENCE]
    limit = LIMITS["fp32"].loss
    matches = {
        "loss": match_positions(losses, expected_losses, limit),
        "scores": match_quality(quality, expected_quality, "base", limit).match,
    }
    return {check for check, match in matches.items() if not match.is_within}


def test_right_cell_passes(measured):
    assert found_by(measured, RIGHT) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(measured, name):
    assert found_by(measured, name) == FOUND_BY[name]
