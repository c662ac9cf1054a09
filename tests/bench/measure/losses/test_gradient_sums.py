"""Sums over gradients from the optimizer's state equal those of the whole gradients, under every engine."""

import math

import pytest
import torch

from bench.measure.losses.gradient_sums import CHUNK, signed_sums, sum_first_moment, sums_of_gradient
from bench.measure.losses.section import SIGNED_SUMS
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from tests.support.cells import make_cell
from tests.support.many_cells import built_workloads, results_of_cells

TOKENS = 96
COMMON = ("strategy=ring", f"seq_len={TOKENS}", "dtype=fp32")
CELLS = {
    "replicas": ("engine=ddp", "cluster.world_size=2"),
    "shards of rows": ("engine=fsdp2", "cluster.world_size=2"),
    "replicas of shards": ("engine=fsdp2", "cluster.world_size=4", "dp_replicate=2", "sp_degree=2"),
    "uneven shards": ("engine=zero3", "cluster.world_size=3"),
    "SGD": ("engine=ddp", "cluster.world_size=2", "optimizer=sgd"),
}


def compare_sums(job, log):
    """Report the largest relative difference of any sum in the second step of every cell, in a rank."""
    results = {}
    for name, workload in built_workloads(job, log):
        trainer, device = workload.trainer, workload.rank.device
        trainer.step(0, TOKENS)
        before = sum_first_moment(trainer.engine, device)
        trainer.accumulate(1, TOKENS)
        gradients = {key: gradient.clone() for key, gradient in trainer.engine.full_gradients()}
        clipping = min(1.0, 1 / float(trainer.engine.update()))
        optimizer = OPTIMIZER_FACTS[trainer.cell.optimizer.name]
        sums = sums_of_gradient(before, sum_first_moment(trainer.engine, device), optimizer)
        assert sums.keys() == gradients.keys()
        results[name] = max(
            math.dist(sums[key], signed_sums(clipping * gradient, key, 0).tolist()) / math.hypot(*sums[key])
            for key, gradient in gradients.items()
        )
    return {"results": results}


def test_sums_from_the_moments_are_those_of_the_gradients(launcher, tmp_path):
    cells = {name: make_cell(*COMMON, *words) for name, words in CELLS.items()}
    results = results_of_cells(launcher, tmp_path, cells, compare_sums)
    for name, cell in cells.items():
        assert len(results[name]) == cell.cluster.world_size
        assert max(results[name]) < 1e-5, results


def test_signed_sums_estimate_the_length_and_add_up_over_shards():
    values = torch.ones(3 * CHUNK // 2)
    whole = signed_sums(values, "weight", 0)
    assert float(whole.norm()) / float(values.norm()) == pytest.approx(1, abs=0.6)
    assert (len(whole), bool(whole.all())) == (SIGNED_SUMS, True)
    first, rest = values.split([1000, len(values) - 1000])
    parts = signed_sums(first, "weight", 0) + signed_sums(rest, "weight", 1000)
    assert torch.allclose(parts, whole)
    assert not torch.allclose(signed_sums(values, "other", 0), whole)
