"""Each reason once, with the cells that met it; reasons that differ in figures alone are one."""

import pytest

from analysis.answers.no_result import failure_reasons, merged
from tests.support.records import make_failure

OOM = "rank {}, {}: no room for {} more of host memory, with {} held of a limit of 61.4 MiB"


def failure(status, reason, length, **config):
    return make_failure(status, reason, config={"seq_len": length, **config})


def test_failures_that_differ_in_figures_alone_are_told_once_with_the_figures_range(cells_of):
    records = [
        failure("out_of_memory", OOM.format(0, "timing forward", "512.0 KiB", "61.2 MiB"), 1024),
        failure("out_of_memory", OOM.format(1, "parity", "8.0 MiB", "5.0 MiB"), 2048, strategy="ring"),
        failure("error", "rank 1, build: ValueError: 3 is no head", 4096),
        failure("error", "rank 0, finish: ValueError: 3 is no head", 8192),
    ]
    ranges = "no room for 512.0 KiB to 8.0 MiB more of host memory, with 5.0 MiB to 61.2 MiB held of a limit"
    assert failure_reasons(cells_of(records)) == [
        f"OOM (2), ulysses at 1k; ring at 2k: {ranges} of 61.4 MiB",
        "error (1), ulysses at 4k: rank 1, build: ValueError: 3 is no head",
        "error (1), ulysses at 8k: rank 0, finish: ValueError: 3 is no head",
    ]


@pytest.mark.parametrize(
    ("reasons", "one"),
    [
        (["seq_len=512 of 1, 2, 4", "seq_len=32768 of 1, 2, 4"], "seq_len=512 to 32768 of 1, 2, 4"),
        (
            ["1,024 tokens of bf16 at 64k", "96 tokens of bf16 at 8k"],
            "96 to 1,024 tokens of bf16 at 8k to 64k",
        ),
    ],
)
def test_a_figure_is_no_part_of_a_word(reasons, one):
    assert merged(reasons) == one
