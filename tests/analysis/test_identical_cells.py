"""A/A test: processes of one cell, split into two sides and compared, seldom differ."""

import random

import pytest
from scipy.stats import binomtest

from analysis.cells.difference import Processes, processes_of, speed_difference
from analysis.read.archive import read_archive
from analysis.read.hardware import peak_flops_per_s
from bench.common.statistics import (
    MAX_PROCESSES,
    MIN_PROCESSES,
    SIGNIFICANCE_LEVEL,
    enough_processes,
    pooled_spread,
)
from tests.support.command import run_command

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

COMPARISONS = 500
WORDS = ("seq_len=1k", "strategy=ulysses", "measure.repeats=60", "measure.steps=10", "measure.trace=false")


def test_identical_measured_cells_seldom_differ(tmp_path):
    run_command(tmp_path, "-m", *WORDS, f"sweep_dir={tmp_path / 'sweep'}").check_returncode()
    frame = read_archive([tmp_path / "sweep"], peak_flops_per_s()).frame
    cell, numbers = processes_of(frame.sort_values("started_at")), random.Random(0)
    differences = [speed_difference(*sides(cell, numbers)) for _ in range(COMPARISONS)]
    claims = sum(speed.is_faster or speed.is_slower for speed in differences)
    assert binomtest(claims, COMPARISONS).proportion_ci(method="wilson").low <= SIGNIFICANCE_LEVEL


def sides(cell, numbers):
    """Return two sides; of each pair of consecutive processes, chance gives one to each side."""
    first = numbers.randrange(len(cell) - 2 * MAX_PROCESSES + 1)
    pairs = (numbers.sample((place, place + 1), 2) for place in range(first, first + 2 * MAX_PROCESSES, 2))
    places = [*zip(*pairs, strict=True)]
    spread = pooled_spread([cell.tokens_per_s[place] for place in side[:MIN_PROCESSES]] for side in places)
    return [
        Processes(*zip(*((cell.tokens_per_s[place], cell.started_at[place]) for place in side), strict=True))
        for side in (side[: enough_processes(spread)] for side in places)
    ]
