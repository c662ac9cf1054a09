"""Reasons of failures with their cells; reasons that differ only in numbers count as one."""

from analysis.answers.no_result import failure_reasons
from tests.support.records import make_failure

OOM = "rank {}, {}: no room for {} more of host memory, with {} held of a limit of 61.4 MiB"


def failure(status, reason, length, **config):
    return make_failure(status, reason, config={"seq_len": length, **config})


def test_failure_reasons_that_differ_in_numbers_count_as_one(cells_of):
    records = [
        failure("out_of_memory", OOM.format(0, "timing forward", "512.0 KiB", "61.2 MiB"), 1024),
        failure("out_of_memory", OOM.format(1, "parity", "8.0 MiB", "5.0 MiB"), 2048, strategy="ring"),
        failure("error", "rank 1, build: ValueError: 3 is no head", 4096),
        failure("error", "rank 0, finish: ValueError: 3 is no head", 8192),
    ]
    first = OOM.format(0, "timing forward", "512.0 KiB", "61.2 MiB")
    assert failure_reasons(cells_of(records)) == [
        f"OOM in 2 cells, ulysses at 1k; ring at 2k: for example, {first}",
        "error in 1 cell, ulysses at 4k: rank 1, build: ValueError: 3 is no head",
        "error in 1 cell, ulysses at 8k: rank 0, finish: ValueError: 3 is no head",
    ]
