import pytest

from analysis.figures.figures import figures_for
from analysis.tables.attention import HEADINGS, attention_rows
from tests.analysis.records import make_record, of_attention


def attention_record(**calls):
    config = {"sp_degree": 2, "cluster.world_size": 2, "workload": "attention"}
    return of_attention(make_record(config=config) | {"losses": None}, **calls)


def test_a_call_takes_as_long_as_its_slowest_rank_and_half_of_one_device_is_ideal_on_two(summary_of):
    cell = summary_of([attention_record()]).iloc[0]
    # Slowest rank per call: forward 2, 2, 1; backward 4, 3, 4; together 6, 5, 5.
    assert (cell["attention_forward_ms"], cell["attention_backward_ms"]) == (2.0, 4.0)
    assert cell["attention_flops_per_s"] == pytest.approx(7e9 / 5e-3)
    assert cell["attention_of_single"] == pytest.approx((4 + 8) / 2 / 5)


def test_without_a_single_device_there_is_no_ratio(summary_of):
    record = attention_record(single_forward_ms=None, single_backward_ms=None, control_error_ulps=None)
    cell = summary_of([record]).iloc[0]
    assert cell[["attention_of_single", "control_out_error_ulps"]].isna().all()
    assert cell["out_error_ulps"] == 1.5


def test_only_cells_about_attention_alone_are_in_its_table_and_figures(cells_of):
    trained, alone = cells_of([make_record()]), cells_of([make_record(), attention_record()])
    assert attention_rows(trained) == []
    assert [len(row) for row in attention_rows(alone)] == [len(HEADINGS)]
    assert {*figures_for(alone)} - {*figures_for(trained)} == {"attention_of_single", "error_growth"}
