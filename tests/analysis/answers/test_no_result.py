"""Each reason once, with the cells that met it; reasons that differ in figures alone are one."""

from analysis.answers.no_result import failure_reasons
from tests.support.records import make_failure

OOM = "rank {}, {}: no room for {} more of host memory, with {} held of a limit of 61.4 MiB"


def failure(status, reason, length, **config):
    return make_failure(status, reason, config={"seq_len": length, **config})


def test_failures_that_differ_in_figures_alone_are_told_once_by_the_first(cells_of):
    records = [
        failure("out_of_memory", OOM.format(0, "timing forward", "512.0 KiB", "61.2 MiB"), 1024),
        failure("out_of_memory", OOM.format(1, "parity", "8.0 MiB", "5.0 MiB"), 2048, strategy="ring"),
        failure("error", "rank 1, build: ValueError: 3 is no head", 4096),
        failure("error", "rank 0, finish: ValueError: 3 is no head", 8192),
    ]
    first = OOM.format(0, "timing forward", "512.0 KiB", "61.2 MiB")
    assert failure_reasons(cells_of(records)) == [
        f"OOM (2), ulysses at 1k; ring at 2k, for example: {first}",
        "error (1), ulysses at 4k: rank 1, build: ValueError: 3 is no head",
        "error (1), ulysses at 8k: rank 0, finish: ValueError: 3 is no head",
    ]
