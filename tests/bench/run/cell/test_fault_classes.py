"""Every class of fault makes a wrong result, whose reason names the first difference.

No gate knows these faults. A cell alone shows the faults in FAST_ALONE and SLOW_ALONE. Only a comparison with
`local` on the same data shows the faults in FAST_COMPARED and SLOW_COMPARED.
"""

import re
from functools import partial
from inspect import isfunction, signature

import pytest

from tests.support.cells import run_cell
from tests.support.faults.classes import (
    attention,
    engine,
    late,
    long,
    not_finite,
    rings,
    rope,
    small,
    tokens,
    unwatched,
    window,
)
from tests.support.faults.classes.tampering import run_with_fault
from tests.support.faults.table import (
    ATTENTION,
    FAST_ALONE,
    FAST_COMPARED,
    SLOW_ALONE,
    SLOW_COMPARED,
    cell_of,
)
from tests.support.records import as_line, as_record


def cases(fast, slow):
    return [
        pytest.param(*case, id=f"{case[0].__name__} {' '.join(case[1])}", marks=marks)
        for table, marks in ((fast, ()), (slow, pytest.mark.slow))
        for case in table
    ]


def passes_before(reason):
    """Return slow passes that do not find the fault with this reason."""
    if reason.startswith((ATTENTION, "attention crosses")):
        return ()
    return (
        ("parity",)
        if reason.startswith(("objective", "gradient norm", "rank 0: "))
        else ("parity", "objective")
    )


@pytest.mark.parametrize(("fault", "words", "reason"), cases(FAST_ALONE, SLOW_ALONE))
def test_a_cell_with_a_fault_is_a_wrong_result(launcher, tmp_path, fault, words, reason):
    entry, cell = partial(run_with_fault, fault), cell_of(words)
    record, _ = run_cell(launcher, cell, tmp_path, entry, without=passes_before(reason))
    assert record.status == "wrong_result", record.reason
    assert re.search(reason, record.reason)
    assert (record.timing, record.trace, record.fixed_cost_s) == (None, None, None)
    assert (record.checks is None) == (record.failure is not None)
    assert as_record(as_line(record)).reason == record.reason


@pytest.mark.parametrize(("fault", "words", "reason"), cases(FAST_COMPARED, SLOW_COMPARED))
def test_a_fault_that_no_gate_finds_departs_from_local(
    launcher, tmp_path, compared_with_local, fault, words, reason
):
    cell = cell_of(words)
    alone, _ = run_cell(launcher, cell, tmp_path, partial(run_with_fault, fault))
    assert (alone.status, alone.reason) == ("ok", None)
    record = compared_with_local(cell, alone)
    assert record.status == "wrong_result"
    assert record.reason.startswith(reason)
    assert record.reason.endswith("of local on the same data")
    assert (record.timing, record.fixed_cost_s) == (None, None)


@pytest.mark.parametrize(
    "module",
    [attention, tokens, rope, rings, long, engine, late, small, not_finite, unwatched, window],
)
def test_each_fault_class_has_three_faults_all_in_a_table(module):
    functions = filter(isfunction, vars(module).values())
    faults = {function for function in functions if [*signature(function).parameters] == ["job"]}
    assert len(faults) >= 3
    assert faults <= {fault for fault, *_ in (*FAST_ALONE, *SLOW_ALONE, *FAST_COMPARED, *SLOW_COMPARED)}
