from analysis.figures.figures import figures_for
from analysis.tables.attention import HEADINGS, attention_rows
from tests.analysis.records import make_record, of_attention


def attention_record(**calls):
    config = {"sp_degree": 2, "cluster.world_size": 2, "workload": "attention"}
    return of_attention(make_record(config=config) | {"losses": None}, **calls)


def test_without_a_single_device_there_is_no_ratio(summary_of):
    record = attention_record(single_forward_ms=None, single_backward_ms=None)
    assert summary_of([record]).iloc[0][["attention_of_single"]].isna().all()


def test_only_cells_about_attention_alone_are_in_its_table_and_figures(cells_of):
    trained, alone = cells_of([make_record()]), cells_of([make_record(), attention_record()])
    assert attention_rows(trained) == []
    assert [len(row) for row in attention_rows(alone)] == [len(HEADINGS)]
    assert {*figures_for(alone)} - {*figures_for(trained)} == {"attention_of_single", "error_growth"}
