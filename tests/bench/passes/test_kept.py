"""Cells that round alike measure rounding once; others do not share it."""

import math

import pytest
import torch

from bench.passes.objective.kept import Kept
from bench.passes.objective.whole_model import GradientError, Noise
from bench.strategies.strategy import Batch
from tests.cells import make_cell

CELL = make_cell("strategy=ulysses", "cluster.world_size=2")
NOISE = Noise(0.1, 0.2, 0.3, 0.4, {"w": GradientError(math.inf, 0.5, 7, 0.25)})


def batch(first=0):
    tokens = torch.arange(first, first + 8).view(1, 8)
    return Batch(torch.tensor([0]), tokens, tokens + 1, tokens - first)


def found(kept, noise=NOISE, *decides):
    """What is read or measured, and whether it was measured."""
    measured = []
    return kept.get(Noise, lambda: measured.append(noise) or noise, *decides), measured != []


TWO = ("strategy=ulysses", "cluster.world_size=2")


@pytest.mark.parametrize(
    "kept",
    [
        (make_cell(*TWO, "dtype=fp32"), [batch()], True),
        (make_cell(*TWO, "model=qwen3_nano", "model.num_layers=7"), [batch()], True),
        (make_cell(*TWO, "seed=1"), [batch()], True),
        (CELL, [batch(first=1)], True),
        (CELL, [batch(), batch()], True),
        (CELL, [batch()], False),
        (CELL, [batch()], True, "ntk of 65536 tokens"),
    ],
    ids=["dtype", "model", "seed", "tokens", "sequences", "rounding of weights", "rotary frequencies"],
)
def test_what_rounds_otherwise_is_measured_on_its_own(tmp_path, kept):
    found(Kept.of(tmp_path, CELL, [batch()], True))
    assert found(Kept.of(tmp_path, *kept))[1]


@pytest.mark.parametrize("made_by", ["sources_digest", "installed"])
def test_what_other_software_measured_is_measured_again(tmp_path, monkeypatch, made_by):
    found(Kept.of(tmp_path, CELL, [batch()], True))
    monkeypatch.setattr(f"bench.passes.objective.kept.{made_by}", lambda *_: "another")
    assert found(Kept.of(tmp_path, CELL, [batch()], True))[1]


def test_cells_of_other_lengths_and_strategies_share_it_and_a_file_cut_short_is_measured_again(tmp_path):
    longer = make_cell("strategy=ring", "cluster.world_size=2", "seq_len=64k")
    kept = Kept.of(tmp_path, longer, [batch()], True)
    assert found(Kept.of(tmp_path, CELL, [batch()], True)) == (NOISE, True)
    assert found(kept) == (NOISE, False)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:20])
    assert [found(kept), found(kept)] == [(NOISE, True), (NOISE, False)]


@pytest.mark.parametrize("folder", [None, "full"])
def test_without_a_folder_or_on_a_full_disk_the_measurement_holds(tmp_path, monkeypatch, folder):
    def write_text(*_, **__):
        raise OSError(28, "full")

    monkeypatch.setattr("pathlib.Path.write_text", write_text)
    kept = Kept.of(folder and tmp_path / folder, CELL, [batch()], True)
    assert [found(kept), found(kept)] == [(NOISE, True), (NOISE, True)]
