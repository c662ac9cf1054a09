from tests.support.records import make_record


def labels(cells):
    return [series.label for series in cells.series]


def test_series_label_without_constant_settings(cells_of):
    records = [
        make_record(config={"strategy": strategy, "layout": layout})
        for strategy, layout in (("local", "contiguous"), ("ulysses", "contiguous"), ("ring", "zigzag"))
    ]
    assert labels(cells_of(records)) == ["local", "ring", "ulysses"]


def test_series_label_with_a_varying_degree(cells_of):
    records = [make_record(config={"sp_degree": n, "cluster.world_size": n}) for n in (2, 4)]
    assert labels(cells_of(records)) == ["ulysses, sp 2", "ulysses, sp 4"]


def test_series_has_one_cell_per_length(cells_of):
    records = [make_record(config={"env.NCCL_ALGO": name, "seed": seed}) for name in "ab" for seed in (0, 1)]
    cells = cells_of(records)
    assert set(cells.keys) == {"env.NCCL_ALGO", "seed"}
    assert all(len(series.rows) == 1 for series in cells.series)
