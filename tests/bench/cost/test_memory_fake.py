"""The memory formula against torch's own tracker on models of full widths, whose tensors have no numbers."""

import subprocess
import sys

import pytest

from bench.environment import REPOSITORY

CELL = "strategy=ulysses model=qwen3_4b checkpointing=true"
TWO_LAYERS = "model.num_layers=2"
ALL_LAYERS = "model.num_layers=36"


def peaks(*cells):
    """By cell the tracker's peak over the formula's."""
    words = [f"{CELL} {each}" for each in cells]
    command = [sys.executable, "-W", "ignore", "-m", "tests.scripts.fake_peak", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    pairs = [map(int, line.split()) for line in done.stdout.splitlines()]
    return [tracked / formula for tracked, formula in pairs]


@pytest.mark.slow
def test_two_layers_of_full_width_take_what_the_formula_says():
    """The loss is the fullest moment of the first, a layer's backward that of the second."""
    at_loss, in_layer = peaks(
        f"{TWO_LAYERS} loss=untiled seq_len=8k", f"{TWO_LAYERS} loss=chunked seq_len=96k"
    )
    assert at_loss == pytest.approx(1, rel=1e-4)
    assert in_layer == pytest.approx(1, rel=0.03)


@pytest.mark.slow
def test_all_layers_of_the_published_model_take_what_the_formula_says():
    short, long = peaks(*(f"{ALL_LAYERS} loss=untiled seq_len={length}" for length in ("8k", "96k")))
    assert short == pytest.approx(1, rel=0.03)
    assert long == pytest.approx(1, rel=1e-3)
