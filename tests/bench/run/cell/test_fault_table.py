"""The kept table has a row for every fault, and a run prints that row."""

from tests.support.fault_table import CHECKS, FAULTS, KEPT, FaultRuns, kept_rows, row, table
from tests.support.faults.classes.tampering import no_fault

ROWS = kept_rows(KEPT.read_text())
GRADIENT_ALONE = ("train_a_matrix_on_the_tokens_of_rank_0", "seq_len=2k")
RAISED = ("lose_a_parameter_of_rank_1_at_load", "-")


def test_every_fault_has_a_row_and_is_found():
    assert ROWS.keys() == FAULTS.keys()
    assert {key for key, found in ROWS.items() if not found} == {
        (no_fault.__name__, "-"),
        (no_fault.__name__, "strategy=ring"),
    }


def test_a_row_says_whether_one_check_alone_finds_a_fault():
    assert row(GRADIENT_ALONE, ["parity"]).split()[-2:] == ["alone", "parity"]
    assert row(GRADIENT_ALONE, ["parity", "trace"]).split()[-3:] == ["-", "parity,", "trace"]
    assert row(GRADIENT_ALONE, []).split()[-2:] == ["-", "-"]


def test_a_table_can_be_read_back():
    found = {GRADIENT_ALONE: ["compared: gradient_match"], RAISED: ["updates", "objective"]}
    assert kept_rows(table(found)) == found
    (line,) = (line for line in table(found).splitlines() if line.startswith("objective"))
    assert line.split() == ["objective", "1", "0"]


def test_a_run_goes_on_after_a_pass_that_ends_the_cell(launcher, tmp_path):
    runs = FaultRuns(launcher, tmp_path)
    found = {key: runs.checks_that_find(*FAULTS[key]) for key in (RAISED, GRADIENT_ALONE)}
    assert found == {key: ROWS[key] for key in found}
    assert {*found[RAISED]} < {*CHECKS}
