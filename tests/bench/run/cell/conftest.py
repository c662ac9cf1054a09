"""Compare records with the reference of their work, as a sweep does."""

import pytest

from bench.plan.local_cells import reference_of
from bench.plan.work import work_of
from bench.run.references import Trajectories
from tests.support.cells import run_cell


@pytest.fixture(scope="module")
def compared_with_local(launcher, tmp_path_factory):
    """Return a function that compares a record with `local` of the same work, which runs once a module."""
    trajectories = Trajectories()

    def compare(cell, record):
        if cell.workload.trains and not trajectories.has_reference(work_of(cell)):
            reference = reference_of(cell)
            record_of_local, _ = run_cell(launcher, reference, tmp_path_factory.mktemp("local"))
            assert record_of_local.status == "ok", record_of_local.reason
            trajectories.compare(reference, record_of_local)
        return trajectories.compare(cell, record)

    return compare
