import pytest

from tests.support.records import make_record, make_timing, make_trace

LOCAL = {"strategy": "local"}


def local(ms, config=None, **overrides):
    timing = make_timing([[ms] * 8])
    return make_record(config=LOCAL | (config or {}), timing=timing, **overrides)


def speed_up(summary):
    return summary.loc[summary["strategy"] == "ulysses", "speed_up"].iloc[0]


def test_speed_up_is_over_a_named_base(summary_of):
    base = local(250.0)
    summary = summary_of([base, make_record()])
    assert speed_up(summary) == pytest.approx(2.5)
    assert set(summary["speed_up_base_cell_id"]) == {base["cell_id"]}
    assert set(summary["speed_up_base_ranks"]) == {1}


def test_speed_up_base_is_the_fastest_local_cell(summary_of):
    records = [local(250.0), local(200.0, {"kernel": "cudnn"}), make_record()]
    assert speed_up(summary_of(records)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"seq_len": 16384}},
        {"config": {"model.num_layers": 2}},
        {"config": {"batch": 2}},
        {"config": {"hardware": "a100_80gb"}},
        {"environment": {"device_name": "NVIDIA H100 PCIe"}},
        {"provenance": "replayed"},
        {"status": "out_of_memory"},
    ],
)
def test_speed_up_needs_a_base_of_the_same_work_and_machine(summary_of, other):
    assert str(speed_up(summary_of([local(250.0, **other), make_record()]))) == "nan"


def test_strategy_options_do_not_change_the_work(summary_of):
    assert speed_up(summary_of([local(250.0), make_record(config={"strategy.rotation": "alltoall"})])) == 2.5


def test_speed_up_compares_equal_sequences_per_step(summary_of):
    records = [local(250.0, {"batch": 2}), make_record(config={"dp_shard": 2})]
    assert speed_up(summary_of(records)) == pytest.approx(2.5)


def over_data_parallel(summary, strategy):
    return summary.loc[summary["strategy"] == strategy, "over_data_parallel"].tolist()


def test_over_data_parallel_compares_equal_ranks_and_tokens(summary_of):
    """Two ranks take 80 ms for two sequences, one each, and 100 ms if they share both."""
    shared = make_record(config={"grad_accum": 2})
    apart = {"dp_shard": 2, "cluster.world_size": 2}
    parallel = make_record(config=LOCAL | apart, timing=make_timing([[80.0] * 8] * 2))
    summary = summary_of([shared, parallel, local(250.0)])
    assert over_data_parallel(summary, "ulysses") == [pytest.approx(0.8)]
    assert [*map(str, over_data_parallel(summary, "local"))] == ["nan", "nan"]
    for other in ({"grad_accum": 2}, {"cluster.world_size": 4}, {"seq_len": 16384}):
        lone = make_record(config=LOCAL | apart | other, timing=make_timing([[80.0] * 8] * 2))
        assert str(*over_data_parallel(summary_of([shared, lone]), "ulysses")) == "nan"


def test_ideal_attention_share_of_attention_compute(summary_of):
    one, two = (make_trace(ranks, ms) for ranks, ms in ((1, 90.0), (2, 60.0)))
    summary = summary_of([make_record(config=LOCAL, trace=one), make_record(trace=two)])
    assert summary.set_index("strategy")["ideal_attention_share"].to_dict() == {"local": 1.0, "ulysses": 0.75}
