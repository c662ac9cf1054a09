"""A record of every status is reported, compared, and counts or runs again in a resumed sweep."""

import pytest

from analysis import compare, report
from bench.common.environment import describe_environment
from bench.plan.plan import plan
from bench.record.record import RESULT_STATUSES, Status
from bench.run.resume import sweep_start
from tests.support.cells import TWO_CORES, make_raw
from tests.support.records import make_failure, make_record, write_sweep


def planned(folder, *words):
    return plan([make_raw("strategy=ulysses", f"sweep_dir={folder}", *words)], TWO_CORES, single=False)


def record_of(cell, status):
    own = {"config": cell.flat(), "cell_id": cell.cell_id, "environment": describe_environment({})}
    if status is Status.OK:
        return make_record(**own)
    return make_failure(status, "why", **own)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("status", Status)
def test_every_status_is_reported_compared_and_resumed(status, tmp_path, capsys):
    cell, other = (planned("out", f"seq_len={length}").cells[0].cell for length in ("1k", "2k"))
    sides = {
        "alone": [record_of(cell, status)],
        "with another cell": [record_of(cell, status), record_of(other, Status.OK)],
    }
    folders = [write_sweep(tmp_path / name, records) for name, records in sides.items()]
    assert [report.main([str(folder)]) for folder in folders] == [0, 0]
    assert compare.main([*map(str, folders)]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())
    again = planned(folders[0], "seq_len=1k", "resume=true")
    start = sweep_start(again)
    assert len(start.pending) == (status not in RESULT_STATUSES)
    assert start.lines == ()
