"""The memory formula against torch's tracker for models of full width, with fake tensors."""

import subprocess
import sys

import pytest

from bench.common.environment import REPOSITORY

CELL = "strategy=ulysses model=qwen3_4b checkpointing=true"


def peaks(*cells):
    """The tracker's peak over the formula's for each cell."""
    words = [f"{CELL} {cell}" for cell in cells]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.scripts.fake_peak", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    pairs = [map(int, line.split()) for line in done.stdout.splitlines()]
    return [tracked / formula for tracked, formula in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "settings", "tolerances"),
    [
        # The first peak is at the loss, the second at a layer's backward.
        (2, ("loss=untiled seq_len=8k", "loss=chunked seq_len=96k"), (1e-4, 0.03)),
        (36, ("loss=untiled seq_len=8k", "loss=untiled seq_len=96k"), (0.03, 1e-3)),
    ],
)
def test_memory_formula_matches_the_tracker_at_full_width(layers, settings, tolerances):
    ratios = peaks(*(f"model.num_layers={layers} {words}" for words in settings))
    for ratio, tolerance in zip(ratios, tolerances, strict=True):
        assert abs(ratio - 1) <= tolerance
