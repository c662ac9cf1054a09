"""Commands of docs/implementations.md, and their cells without the refusal, end as the page says."""

import re
import shlex

import pytest

from bench.common.environment import REPOSITORY
from bench.config import Cell
from bench.plan.planned import PlannedCell
from bench.run.cell.run import SharedSections, measure
from tests.support.cells import INSTALLED
from tests.support.command import run_command_here
from tests.support.records import read_lines

PAGE = (REPOSITORY / "docs" / "implementations.md").read_text()
OUTCOME = r"`(\w+)`, \"(.+)\"\n"
FINDING = re.compile(
    rf"^ {{4}}python run_sweep\.py (-m .*)\n\n- A sweep: {OUTCOME}- Past the refusal: {OUTCOME}", re.MULTILINE
)
FINDINGS = FINDING.findall(PAGE)


def test_every_command_of_the_page_has_two_outcomes():
    assert len(FINDINGS) == PAGE.count("    python run_sweep.py ") > 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding[0])
def test_command_of_the_page_ends_as_stated(finding, launcher, tmp_path):
    words, status, reason, status_past, reason_past = finding
    done = run_command_here(tmp_path, *shlex.split(words))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("results/sweeps/*/records.jsonl")
    records = [record for record in read_lines(path) if record["config"]["strategy"] in INSTALLED]
    if not records:
        pytest.skip("no package of this command is installed")
    for record in records:
        cell = Cell.from_flat(record["config"])
        assert record["status"] == status
        assert reason in record["reason"]
        past = measure(PlannedCell(cell, repeat=0, order=0), launcher, tmp_path, shared=SharedSections())
        assert past.status == status_past
        assert reason_past in past.reason
