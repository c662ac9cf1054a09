"""What a report says to do about the cells without a result."""

from analysis.answers.next_steps import next_steps
from bench.next_steps import NEXT_STEPS
from tests.analysis.records import make_failure


def test_a_report_says_it_once_per_status(cells_of):
    statuses = [*NEXT_STEPS, *NEXT_STEPS]
    failures = [make_failure(each, "why", config={"seq_len": 1024 * n}) for n, each in enumerate(statuses, 1)]
    lines = next_steps(cells_of(failures))
    assert len(lines) == len(NEXT_STEPS)
    oom = next(line for line in lines if "OOM" in line)
    assert oom.startswith("What to do, OOM: where it no longer fits")
    assert "memory_limit" not in oom
