"""Requests of `mode=replay`: the rank that runs, its device, and what cannot be replayed."""

import subprocess
import sys
from dataclasses import replace

import pytest

from bench.config import Cell, ConfigError
from bench.plan.experiments import experiment_of
from bench.request.legality import refusal
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell, make_raw

FOUR = ("mode=replay", "cluster.world_size=4")
ONE_H100 = replace(FOUR_H100, gpus=FOUR_H100.gpus[:1], gpu_memory_bytes=(80 * 2**30,))


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        (("strategy=ulysses",), 0),
        (("strategy=ring",), 0),
        (("strategy=ring", "layout=contiguous"), 3),
        (("strategy=ring", "layout=contiguous", "sp_degree=2"), 1),  # of the first group
        (("strategy=distflash_attn",), 3),
        (("strategy=ulysses", "replay.rank=2"), 2),
        (("strategy=local", "replay.rank=2"), 0),  # local has one rank
    ],
)
def test_replay_runs_the_busiest_rank_or_the_requested_one(words, rank):
    cell = make_cell(*FOUR, *words)
    assert (refusal(cell), [*cell.running_ranks]) == (None, [rank])
    assert Cell.from_flat(cell.flat()) == cell


def test_replay_assumes_a_copy_of_the_gpu_for_each_rank():
    cell = make_cell(*FOUR, "strategy=ring", machine=ONE_H100)
    assert (cell.cluster.world_size, cell.cluster.device, cell.hardware) == (4, "cuda", "h100_80gb")
    assert cell.model.name == "qwen3_4b"  # as on four of them
    assert make_cell("mode=replay", "strategy=ring", machine=ONE_H100).cluster.world_size == 8  # a node
    assert make_cell("mode=replay", "strategy=ring", machine=TWO_CORES).cluster.world_size == 2


def test_replay_rank_is_part_of_the_cell_id():
    ranks = [make_cell(*FOUR, "strategy=ring", f"replay.rank={rank}") for rank in (0, 1)]
    assert len({cell.cell_id for cell in ranks}) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay.rank=1",), "replay.rank=1: belongs to mode=replay; add mode=replay, or leave it out"),
        ((*FOUR, "replay.rank=4"), "replay.rank=4: ranks are numbered from 0 to 3; write replay.rank=auto"),
        ((*FOUR, "replay.rank=first"), "replay.rank=first: must be a whole number"),
        ((*FOUR, "hardware=h100_80gb"), "mode=replay runs a rank on this machine, hardware=cpu"),
    ],
)
def test_invalid_replay_request_is_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_cell("strategy=ring", *words)


@pytest.mark.parametrize(
    "word",
    [
        "trainer=transformers",
        "cluster=slurm",
        "measure.keep_traces=true",
    ],
)
def test_replay_of_several_ranks_is_unsupported_with_way_out(word):
    cell = make_cell(*FOUR, "strategy=deepspeed_ulysses", word)
    assert f"mode=replay runs one rank: {word}" in refusal(cell)


@pytest.mark.parametrize("mode", ["replay", "predict"])
@pytest.mark.parametrize("name", ["loss_equivalence", "quality"])
def test_experiments_that_compare_values_refuse_other_modes(name, mode):
    with pytest.raises(ConfigError, match=f"mode={mode}: experiment={name} compares values, which only"):
        experiment_of([make_raw(f"experiment={name}", f"mode={mode}")])


def test_unregistered_mode_is_refused_with_a_way_out():
    """This needs a new process, because the tests have registered all modes."""
    code = """
import sys
from tests.support.cells import make_cell
from bench.request.legality import refusal
cell = make_cell("mode=predict", "hardware=h100_80gb")
try:
    refusal(cell)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("ConfigError: mode=predict: ")
    assert "bench.extras.predict.time_modes.register()" in done.stderr
