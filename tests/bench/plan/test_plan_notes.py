"""What a sweep says before its first cell: what was chosen and left out, and what will run out of memory."""

import re
from dataclasses import replace

import pytest

import run_sweep
from bench.common.labels import length_label
from bench.cost.band import Fit
from bench.extras.predict.prediction import modelled
from bench.plan.estimate import Estimate
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import RUNS_ANYWAY, short_lines
from bench.request.choices import default_strategies, read_option
from bench.request.legality import refusal
from tests.support.cells import FOUR_H100, TWO_CORES, make_raw, raws_of
from tests.support.command import typed_here

README = ("8k", "64k", "96k")
H100 = FOUR_H100.gpus[0]


def gpus(count, name=H100):
    return replace(FOUR_H100, gpus=(name,) * count, gpu_memory_bytes=(24 * 2**30,) * count)


def planned(machine, strategies=(), lengths=README, **values):
    """As `python run_sweep.py -m seq_len=...` plans it, or with strategies named."""
    raws = raws_of(strategies, lengths, **values)
    return plan(raws, machine, single=False, default_strategies=not strategies)


def short_of_memory(found, machine):
    """The cells that do not surely fit, as the table of `--plan` and the short lines tell them."""
    forecast = Forecast(found, found.cells, Estimate(modelled))
    short = [each for each in forecast.cells if each.room and each.room.fit is not Fit.FITS]
    told = [line for line in short_lines(forecast) if RUNS_ANYWAY in line]
    assert sum(int(line.split()[0]) for line in told) == len(short)
    return [(each.cell.strategy, length_label(each.cell.seq_len), str(each.room.fit)) for each in short]


def test_one_gpu_compares_local_with_itself_and_says_what_the_others_need():
    found = planned(gpus(1))
    kept = {(each.cell.strategy, each.cell.seq_len, each.cell.checkpointing) for each in found.cells}
    assert kept == {("local", 1024 * k, flag) for k in (8, 64, 96) for flag in (True, False)}
    assert found.notes[0].startswith("left out: deepspeed_ulysses, ring_flash_attn, whose ranks share")
    assert "mode=replay cluster.world_size=4 compares them on one GPU" in found.notes[0]
    assert found.notes[0].endswith("local with checkpointing on and off")
    assert {length for _, length, _ in short_of_memory(found, gpus(1))} == {"64k", "96k"}


@pytest.mark.parametrize(
    ("machine", "values"),
    [
        (gpus(4), {}),
        (gpus(1), {"cluster__ranks_per_gpu": 4}),
        (TWO_CORES, {"cluster__world_size": 1}),
        (gpus(1), {"strategies": ("local", "deepspeed_ulysses", "ring_flash_attn")}),
    ],
)
def test_everywhere_else_and_where_somebody_named_strategies_the_sweep_stays_whole(machine, values):
    found = planned(machine, **values)
    assert len(found.cells) == 9
    assert not [note for note in found.notes if note.startswith("left out")]


def test_one_gpu_keeps_to_the_checkpointing_that_was_named():
    found = planned(gpus(1), checkpointing=False)
    assert [each.cell.checkpointing for each in found.cells] == [False] * 3
    assert found.notes[0].endswith("checks their results there")


def test_a_replay_on_one_gpu_names_its_ranks_and_takes_ten_minutes_for_six_cells():
    strategies = ("deepspeed_ulysses", "ring_flash_attn")
    found = planned(gpus(1), strategies, mode="replay", cluster__world_size=4, loss="untiled")
    assert [each.cell.running_ranks for each in found.cells] == [range(1)] * 6
    (said,) = (note for note in found.notes if "replay" in note)
    assert "(deepspeed_ulysses rank 0 of 4, ring_flash_attn rank 0 of 4)" in said
    forecast = Forecast(found, found.cells, Estimate(modelled))
    assert forecast.total_s < 10 * 60  # three lengths of two strategies
    assert forecast.references == ()


def test_the_one_rank_of_a_replay_on_a_cpu_has_all_of_its_memory():
    found = planned(TWO_CORES, ("ring",), ["8k"], mode="replay", cluster__world_size=4)
    (cell,) = Forecast(found, found.cells, Estimate(modelled)).cells
    assert cell.room.usable == TWO_CORES.memory_bytes


def test_the_base_of_the_readmes_sweep_is_sharded_where_one_gpu_may_not_hold_the_model():
    found = planned(gpus(8))
    assert short_of_memory(found, gpus(8)) == []
    assert [
        note for note in found.notes if note.startswith("local runs with dp_shard=8, one sequence a rank")
    ]
    bases = [each.cell for each in found.cells if each.cell.strategy == "local"]
    assert {(cell.dp_shard, cell.measure.trace, cell.measure.min_timed_steps) for cell in bases} == {
        (8, False, 1)
    }
    for values in ({"model": read_option("model", "qwen3_0_6b")}, {"dp_shard": 1}, {"engine__name": "ddp"}):
        bases = [each.cell for each in planned(gpus(8), **values).cells if each.cell.strategy == "local"]
        assert {cell.dp_shard for cell in bases} == {1}


def test_the_base_is_sharded_among_the_ranks_of_its_own_cells():
    requests = ({"cluster__world_size": 4}, {"cluster__world_size": 8}, {"dp_replicate": 2})
    raws = [raw for values in requests for raw in raws_of((), ("64k",), **values)]
    found = plan(raws, gpus(8), single=False, default_strategies=True)
    bases = [each.cell for each in found.cells if each.cell.strategy == "local"]
    assert sorted((cell.cluster.world_size, cell.dp_shard) for cell in bases) == [(4, 4), (8, 4), (8, 8)]
    own = planned(gpus(8), lengths=["64k"], measure__min_timed_steps=6)
    assert {each.cell.measure.min_timed_steps for each in own.cells} == {6}
    assert "dp_shard" not in " ".join(planned(gpus(1)).notes)
    assert "dp_shard" not in " ".join(planned(TWO_CORES, kernel="flash_attn_3").notes)


MACHINES = {
    "1 H100": (gpus(1), {}, set()),
    "4 H100": (gpus(4), {}, {98304}),
    "8 H100": (gpus(8), {}, {98304}),
    "one 4090": (gpus(1, "NVIDIA GeForce RTX 4090"), {}, set()),
}


@pytest.mark.parametrize("where", MACHINES)
def test_the_readmes_command_decides_a_length_within_35_minutes(where):
    machine, values, decided = MACHINES[where]
    found = planned(machine, **values)
    forecast = Forecast(found, found.cells, Estimate(modelled))
    repeats = [each for each in forecast.repeats if each.gets]
    assert {each.seq_len for each in repeats} == decided
    took_s = forecast.total_s + sum(each.gets_s for each in repeats)
    assert took_s < 35 * 60


def test_an_illegal_cell_needs_nothing():
    refused = planned(gpus(4), strategies=("local",), lengths=["1m"], dtype="fp16")
    assert short_of_memory(refused, gpus(4)) == []


def test_a_cpu_warns_of_a_limit_and_of_nothing_else():
    limited = planned(TWO_CORES, cluster__memory_limit_gib=0.2)
    short = [each[:2] for each in short_of_memory(limited, TWO_CORES)]
    assert short == [("local", "64k"), *((name, "96k") for name in default_strategies())]
    assert short_of_memory(planned(TWO_CORES), TWO_CORES) == []


@pytest.mark.parametrize(("count", "taken"), [(3, 2), (6, 4)])
def test_on_an_odd_number_of_gpus_no_default_cell_is_refused_and_the_plan_says_who_is_idle(count, taken):
    found = planned(gpus(count))
    cells = [each.cell for each in found.cells]
    assert [refusal(cell) for cell in cells] == [None] * 9
    assert {cell.sp_degree for cell in cells if cell.strategy != "local"} == {taken}
    (said,) = [note for note in found.notes if "stay idle" in note]
    assert said.startswith(f"cluster.world_size=auto: {taken} of {count} GPUs")
    assert f"cluster.world_size={count} lets all share a sequence" in said
    assert ("sp_degree=2 takes all in 3 groups" in said) == (count == 6)


def test_contiguous_rings_beside_balanced_ones_are_named():
    for strategies, said in (
        (("ring", "ulysses"), []),
        (("ulysses", "ringmaster_ring"), []),
        (
            ("ring", "ringmaster_ring"),
            ["layout: causal work is uneven with ringmaster_ring and even with ring;"],
        ),
    ):
        notes = planned(TWO_CORES, strategies=strategies).notes
        assert [note.partition(" alike")[0] for note in notes if note.startswith("layout:")] == said


NEWER = "kernel=torch_flash is FlashAttention-2; on "
KERNELS = [
    (gpus(4), {}, f"{NEWER}Hopper FlashAttention-3 or cuDNN is likely faster"),
    (gpus(4, "NVIDIA B200"), {}, f"{NEWER}Blackwell FlashAttention-4 or cuDNN is likely faster"),
    (replace(gpus(4, "NVIDIA H20"), gpu_capabilities=("9.0",) * 4), {}, f"{NEWER}Hopper"),
    (TWO_CORES, {"mode": "predict", "hardware": read_option("hardware", "h200_141gb")}, f"{NEWER}Hopper"),
    (gpus(4, "NVIDIA A100-SXM4-80GB"), {}, None),
    (gpus(4), {"kernel": "math"}, None),
]


@pytest.mark.parametrize(("machine", "values", "said"), KERNELS)
def test_on_newer_gpus_the_plan_says_that_there_are_likely_faster_kernels(machine, values, said):
    notes = planned(machine, lengths=["8k"], strategies=("ulysses",), **values).notes
    told = [note for note in notes if "FlashAttention" in note]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith(said)
        assert told[0].endswith("python run_sweep.py -m kernel=torch_flash,cudnn seq_len=8k,32k")


def test_whoever_compares_kernels_is_told_of_none():
    one, other = (raws_of(["ulysses"], ["8k"], kernel=kernel) for kernel in ("torch_flash", "cudnn"))
    assert "FlashAttention" not in " ".join(plan([*one, *other], gpus(4), single=False).notes)


@pytest.mark.parametrize(
    ("machine", "values", "said"),
    [
        (gpus(4), {}, ["on for GPU ranks"]),
        (TWO_CORES, {}, ["off for CPU ranks, which seldom lack memory"]),
        (gpus(4), {"checkpointing": True}, []),
        (gpus(4), {"workload__name": "attention"}, []),
    ],
)
def test_checkpointing_is_picked_by_the_device_and_the_plan_says_why(machine, values, said):
    found = planned(machine, lengths=["8k"], **values)
    is_on = machine is not TWO_CORES and "workload__name" not in values
    assert {each.cell.checkpointing for each in found.cells} == {is_on}
    lines = [note for note in found.notes if note.startswith("checkpointing=auto")]
    assert [line.split(": ")[1] for line in lines] == said


def test_a_device_without_a_datasheet_is_named_and_its_own_memory_counts():
    found = planned(gpus(4, "NVIDIA A10G"), lengths=["8k"])
    assert {each.cell.hardware for each in found.cells} == {"unknown"}
    assert "no file of conf/hardware/ names NVIDIA A10G, so there is no MFU" in " ".join(found.notes)
    forecast = Forecast(found, found.cells, Estimate(modelled))
    assert {each.room.usable for each in forecast.cells} == {24 * 2**30}


def test_the_command_knows_whether_somebody_named_a_strategy_and_says_in_short_what_to_expect(
    tmp_path, monkeypatch
):
    plans = []
    monkeypatch.setattr(run_sweep, "this_machine", lambda: gpus(1))
    monkeypatch.setattr(run_sweep, "run_plan", lambda found, *_, **__: plans.append(found) or 0)
    for words in ((), ("strategy=local,ring", "seq_len=8k,1001", "pad=false")):
        assert typed_here(tmp_path, "-m", "seq_len=8k", *words).returncode == 0
    unnamed, named = plans
    assert (len(unnamed.cells), len(named.cells)) == (2, 4)
    assert [any(note.startswith("left out") for note in each.notes) for each in plans] == [True, False]
    said = "\n".join(named.notes)
    assert re.search(
        r"^expected: about \d+ \w+ by the cost model.* of it for one process of each cell; --plan lists",
        said,
        re.MULTILINE,
    )


@pytest.mark.parametrize(("trainer", "engine"), [("native", "fsdp2"), ("accelerate", "zero3")])
def test_one_engine_serves_all_cells_of_a_request(trainer, engine):
    trainers = ({"trainer__name": "native"}, {"trainer__name": trainer})
    raws = [raw for values in trainers for raw in raws_of(["deepspeed_ulysses"], ["1k"], **values)]
    found = plan(raws, TWO_CORES, single=False)
    assert {each.cell.engine.name for each in found.cells} == {engine}


@pytest.mark.parametrize("words", ["trainer=accelerate", "offload.optimizer=true"])
def test_an_experiment_that_chooses_its_strategies_is_planned_with_what_needs_zero3(words):
    raw = make_raw("experiment=max_length", "sweep_dir=out", words)
    found = plan([raw], TWO_CORES, single=False)
    assert {each.cell.engine.name for each in found.cells} <= {"zero3", "none"}
