import pytest

from analysis.answers.provenance import prediction_lines
from analysis.show.sections.cell_tables import predictions_section
from tests.support.records import (
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
    with_prediction,
)
from tests.support.sections import findings_of


def measured(ms, config=None, **prediction):
    timing = make_timing([[ms] * 8] * 2)
    return with_prediction(make_record(config=config, timing=timing), **prediction)


def test_error_is_predicted_over_measured_minus_one(summary_of):
    cell = summary_of([measured(125.0, step_ms=(80.0, 100.0, 120.0))]).iloc[0]
    assert cell["step_time_error_share"] == pytest.approx(-0.2)
    assert cell["peak_allocated_error_share"] == 0
    assert cell["step_time_in_band"] == "no"


def test_band_includes_both_ends(summary_of):
    records = [measured(ms, {"seq_len": 1024 * n}) for n, ms in enumerate((79.9, 80.0, 125.0, 125.1), 1)]
    assert [*summary_of(records)["step_time_in_band"]] == ["no", "yes", "yes", "no"]


def test_shared_gpu_has_memory_error_and_no_time_error(summary_of):
    cell = summary_of([measured(125.0, {"cluster.ranks_per_gpu": 2})]).iloc[0]
    assert cell[["step_time_error_share", "step_time_in_band"]].isna().all()
    assert cell["peak_allocated_error_share"] == 0


def test_cell_is_compared_with_prediction_of_same_settings(cells_of):
    config = {"measure.steps": 3, "cluster.world_size": 4, "cluster.backend": "nccl"}
    ran = make_record(config=config, timing=make_timing([[125.0] * 8] * 4))
    longer = make_record(config=config | {"seq_len": 65536})
    predicted = make_predicted(
        config={"measure.steps": 20, "cluster.world_size": 4}, step_ms=(80.0, 100.0, 120.0)
    )
    frame = cells_of([ran, longer, predicted]).frame.set_index(["provenance", "seq_len"])[
        "step_time_error_share"
    ]
    assert frame["measured", 8192] == pytest.approx(-0.2)
    assert frame.drop([("measured", 8192)]).isna().all()


def test_cell_without_prediction_has_no_error(tmp_path):
    findings = findings_of(tmp_path, [make_record(), make_predicted(config={"seq_len": 4096})])
    cells = findings.cells
    columns = [column for column in cells.frame if "error_share" in column or "in_band" in column]
    assert cells.frame[[*columns, "predicted_fit_outcome"]].isna().all().all()
    assert predictions_section(findings) is None
    assert not prediction_lines(cells)


OUTCOMES = [
    ("fits", "ok", "right"),
    ("fits", "out_of_memory", "wrong"),
    ("out_of_memory", "out_of_memory", "right"),
    ("out_of_memory", "ok", "wrong"),
    ("undecided", "ok", "undecided"),
    ("fits", "timed_out", ""),
    (None, "ok", ""),
]


def test_memory_verdict_is_compared_with_the_run(summary_of):
    records = []
    for number, (fit, status, _) in enumerate(OUTCOMES, 1):
        config = {"seq_len": 1024 * number}
        ran = make_record(config=config) if status == "ok" else make_failure(status, "no", config=config)
        records.append(with_prediction(ran, fit=fit))
    found = summary_of(records)["predicted_fit_outcome"].fillna("")
    assert [*found] == [outcome for *_, outcome in OUTCOMES]


def test_prediction_line_summarises_errors_of_all_cells(cells_of):
    records = [measured(ms, {"seq_len": 1024 * 2**n}) for n, ms in enumerate((100.0, 125.0, 200.0))]
    run_out = make_failure("out_of_memory", "no", config={"seq_len": 65536})
    cells = cells_of([*records, with_prediction(run_out, fit="fits")])
    (line,) = prediction_lines(cells)
    assert line == (
        "Predictions compared with measurements: step time off by 20.0 % in the median of 3 cells and by"
        " 50.0 % at most; peak allocated off by 0.0 % in the median of 3 cells and by 0.0 % at most;"
        " 2 of 3 step times within the band; memory verdicts 3 right, 1 wrong, 0 undecided."
    )


def test_row_has_measured_predicted_and_error(tmp_path):
    records = [measured(125.0, fit="undecided"), *grid(["ring"], [8192])]
    table = predictions_section(findings_of(tmp_path, records)).table
    (row,) = table.rows
    assert row[3:7] == ["125", "100 (80.0 to 125)", "-20.0 %", "yes"]
    assert [column.heading for column in table.columns[4:7]] == ["predicted", "error", "in the band"]
    assert row[-1] == "undecided"
