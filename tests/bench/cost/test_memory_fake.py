"""The memory formula against torch's own tracker on models of full widths, whose tensors have no numbers."""

import subprocess
import sys

import pytest

from bench.common.environment import REPOSITORY

CELL = "strategy=ulysses model=qwen3_4b checkpointing=true"


def peaks(*cells):
    """By cell the tracker's peak over the formula's."""
    words = [f"{CELL} {each}" for each in cells]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.scripts.fake_peak", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    pairs = [map(int, line.split()) for line in done.stdout.splitlines()]
    return [tracked / formula for tracked, formula in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "of_loss", "exact"),
    [
        # The loss is the fullest moment of the first, a layer's backward that of the second.
        (2, ("loss=untiled seq_len=8k", "loss=chunked seq_len=96k"), (1e-4, 0.03)),
        (36, ("loss=untiled seq_len=8k", "loss=untiled seq_len=96k"), (0.03, 1e-3)),
    ],
)
def test_layers_of_full_width_take_what_the_formula_says(layers, of_loss, exact):
    found = peaks(*(f"model.num_layers={layers} {words}" for words in of_loss))
    assert [abs(each - 1) <= within for each, within in zip(found, exact, strict=True)] == [True, True], found
