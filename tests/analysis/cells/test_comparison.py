import pytest

from tests.support.records import make_record, make_timing

LOCAL = {"strategy": "local"}


def local(ms, config=None, **overrides):
    timing = make_timing([[ms] * 8])
    return make_record(config=LOCAL | (config or {}), timing=timing, **overrides)


def speed_up(summary):
    return summary.loc[summary["strategy"] == "ulysses", "speed_up"].iloc[0]


def test_speed_up_is_the_ratio_of_tokens_per_s_and_names_its_base(summary_of):
    base = local(250.0)
    summary = summary_of([base, make_record()])
    assert speed_up(summary) == pytest.approx(2.5)
    assert set(summary["speed_up_base_cell_id"]) == {base["cell_id"]}
    assert set(summary["speed_up_base_ranks"]) == {1}


def test_the_base_is_the_fastest_local_cell(summary_of):
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
def test_speed_up_needs_a_result_of_the_same_work_machine_and_provenance(summary_of, other):
    assert str(speed_up(summary_of([local(250.0, **other), make_record()]))) == "nan"


def test_a_strategy_s_own_options_are_no_other_work(summary_of):
    assert speed_up(summary_of([local(250.0), make_record(config={"strategy.rotation": "alltoall"})])) == 2.5


def test_batches_count_as_whole_sequences_over_all_ranks(summary_of):
    records = [local(250.0, {"batch": 2}), make_record(config={"dp_shard": 2})]
    assert speed_up(summary_of(records)) == pytest.approx(2.5)
