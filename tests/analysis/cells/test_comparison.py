import pytest

from tests.analysis.records import make_failure, make_record, make_timing

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


@pytest.mark.parametrize("provenance", ["predicted", "simulated", "replayed", "published"])
def test_speed_up_never_crosses_provenance(summary_of, provenance):
    assert summary_of([local(250.0, provenance=provenance), make_record()])["speed_up"].isna().sum() == 1
    assert str(speed_up(summary_of([local(250.0, provenance=provenance), make_record()]))) == "nan"


@pytest.mark.parametrize(
    "other",
    [
        {"seq_len": 16384},
        {"model": "qwen3_4b"},
        {"model.num_layers": 2},
        {"dtype": "fp16"},
        {"batch": 2},
        {"engine": "fsdp2"},
        {"hardware": "a100_80gb"},
        {"checkpointing": True},
        {"workload": "attention"},
    ],
)
def test_speed_up_needs_the_same_work_on_the_same_hardware(summary_of, other):
    assert str(speed_up(summary_of([local(250.0, other), make_record()]))) == "nan"


def test_speed_up_needs_the_same_device(summary_of):
    elsewhere = local(250.0, environment={"device_name": "NVIDIA H100 PCIe"})
    assert str(speed_up(summary_of([elsewhere, make_record()]))) == "nan"


def test_a_strategy_s_own_options_are_no_other_work(summary_of):
    assert speed_up(summary_of([local(250.0), make_record(config={"strategy.rotation": "alltoall"})])) == 2.5


def test_batches_count_as_whole_sequences_over_all_ranks(summary_of):
    records = [local(250.0, {"batch": 2}), make_record(config={"dp_shard": 2})]
    assert speed_up(summary_of(records)) == pytest.approx(2.5)


def test_a_failed_base_is_no_base(summary_of):
    records = [make_failure("out_of_memory", "no room", config=LOCAL), make_record()]
    assert str(speed_up(summary_of(records))) == "nan"
