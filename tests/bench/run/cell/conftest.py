"""The reference of a cell's work, as a sweep runs one."""

import pytest

from bench.plan.local_cells import reference_of
from bench.plan.work import work_of
from bench.run.references import Trajectories
from tests.support.cells import run_cell


@pytest.fixture(scope="module")
def held(launcher, tmp_path_factory):
    """Holds a record against `local` of the same work, which runs once a module."""
    kept = Trajectories()

    def hold(cell, record):
        if cell.workload.trains and not kept.has_reference(work_of(cell)):
            reference = reference_of(cell)
            found, _ = run_cell(launcher, reference, tmp_path_factory.mktemp("local"))
            assert found.status == "ok", found.reason
            kept.compare(reference, found)
        return kept.compare(cell, record)

    return hold
