"""The comparison runs both implementations and says which is faster, with an interval."""

import re
import subprocess
import sys

import pytest

from bench.compare_implementations.__main__ import PAIRS, _line


def compare(*words):
    command = [sys.executable, "-m", "bench.compare_implementations", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.ranks
def test_every_pair_is_timed_on_real_ranks():
    done = compare("--lengths", "256", "--ranks", "2", "--repeats", "6")
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if re.search(r"ours [\d.]+ ms, n=6", line)]
    assert [line.split()[3] for line in lines] == [words[0].split("=")[1] for _, words in PAIRS]


def test_a_request_that_cannot_run_is_one_line_and_exit_code_2():
    done = compare("--lengths", "255", "--ranks", "2")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("ratio", "words", "slower"),
    [(1.2, "ours is faster", False), (1.0, "no clear difference", False), (0.8, "slower by 25.0%", True)],
)
def test_the_verdict_follows_the_interval(ratio, words, slower):
    line, is_slower = _line([ratio - 0.01, ratio, ratio + 0.01] * 7, ours_ms=1.0)
    assert words in line
    assert is_slower == slower
