from analysis.cells.series import series_keys, series_of
from tests.analysis.records import make_record


def labels(summary):
    return [series.label for series in series_of(summary)]


def test_what_does_not_vary_is_not_in_the_legend(summary_of):
    records = [
        make_record(config={"strategy": strategy, "layout": layout})
        for strategy, layout in (("local", "contiguous"), ("ulysses", "contiguous"), ("ring", "zigzag"))
    ]
    assert labels(summary_of(records)) == ["local", "ring", "ulysses"]


def test_a_degree_that_varies_within_a_strategy_is(summary_of):
    records = [make_record(config={"sp_degree": n, "cluster.world_size": n}) for n in (2, 4)]
    assert labels(summary_of(records)) == ["ulysses, sp 2", "ulysses, sp 4"]


def test_engines_that_differ_between_strategies_are_named(summary_of):
    records = [make_record(), make_record(config={"strategy": "ring", "engine": "fsdp2"})]
    assert labels(summary_of(records)) == ["ring, fsdp2", "ulysses, zero3"]


def test_provenances_never_share_a_series(summary_of):
    lengths = {"measured": 8192, "predicted": 16384}
    records = [make_record(config={"seq_len": n}, provenance=name) for name, n in lengths.items()]
    assert all(series.rows["provenance"].nunique() == 1 for series in series_of(summary_of(records)))


def test_a_series_has_one_cell_per_length_whatever_setting_is_swept(summary_of):
    records = [make_record(config={"env.NCCL_ALGO": name, "seed": seed}) for name in "ab" for seed in (0, 1)]
    summary = summary_of(records)
    assert set(series_keys(summary)) == {"env.NCCL_ALGO", "seed"}
    assert all(len(series.rows) == 1 for series in series_of(summary))
