"""Notes before the first cell: automatic choices, cells left out, and cells that will run out of memory."""

import re
from dataclasses import replace
from itertools import chain, product

import pytest

import run_sweep
from bench.common.labels import length_label
from bench.config import ConfigError
from bench.cost.band import Fit
from bench.extras.predict.prediction import expected_by_cost_model
from bench.plan.estimate import Estimate
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import RUNS_ANYWAY, short_lines
from bench.request.choices import default_strategies, read_option
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal
from tests.support.cells import FOUR_H100, TWO_CORES, make_raw, raws_of
from tests.support.command import run_command_here

README = ("8k", "64k", "96k")
H100 = FOUR_H100.gpus[0]


def gpus(count, name=H100):
    return replace(FOUR_H100, gpus=(name,) * count, gpu_memory_bytes=(24 * 2**30,) * count)


def planned(machine, strategies=(), lengths=README, **values):
    """Return the plan of `python run_sweep.py -m seq_len=...`, or with these strategies."""
    raws = raws_of(strategies, lengths, **values)
    return plan(raws, machine, single=False, default_strategies=not strategies)


def short_of_memory(sweep_plan, machine):
    """Return the cells that may not fit, and check that the short lines count them."""
    forecast = Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model))
    short = [entry for entry in forecast.cells if entry.room and entry.room.fit is not Fit.FITS]
    lines = [line for line in short_lines(forecast) if RUNS_ANYWAY in line]
    assert sum(int(line.split()[0]) for line in lines) == len(short)
    return [(entry.cell.strategy, length_label(entry.cell.seq_len), str(entry.room.fit)) for entry in short]


def test_one_gpu_compares_local_with_and_without_checkpointing():
    sweep_plan = planned(gpus(1))
    settings = {
        (entry.cell.strategy, entry.cell.seq_len, entry.cell.checkpointing) for entry in sweep_plan.cells
    }
    assert settings == {("local", 1024 * k, flag) for k in (8, 64, 96) for flag in (True, False)}
    assert sweep_plan.notes[0].startswith("left out: deepspeed_ulysses, ring_flash_attn, because")
    assert "mode=replay cluster.world_size=4 compares" in sweep_plan.notes[0]
    assert sweep_plan.notes[0].endswith("local with checkpointing on and off")
    assert {length for _, length, _ in short_of_memory(sweep_plan, gpus(1))} == {"64k", "96k"}


@pytest.mark.parametrize(
    ("machine", "values"),
    [
        (gpus(4), {}),
        (gpus(1), {"cluster__ranks_per_gpu": 4}),
        (TWO_CORES, {"cluster__world_size": 1}),
        (gpus(1), {"strategies": ("local", "deepspeed_ulysses", "ring_flash_attn")}),
    ],
)
def test_sweep_is_not_reduced_with_several_ranks_or_on_a_cpu(machine, values):
    sweep_plan = planned(machine, **values)
    assert len(sweep_plan.cells) == 9
    assert not [note for note in sweep_plan.notes if note.startswith("left out")]


def test_one_gpu_keeps_the_requested_checkpointing():
    sweep_plan = planned(gpus(1), checkpointing=False)
    assert [entry.cell.checkpointing for entry in sweep_plan.cells] == [False] * 3
    assert sweep_plan.notes[0].endswith("checks their results there")


def test_replay_note_names_ranks_and_six_cells_take_ten_minutes():
    strategies = ("deepspeed_ulysses", "ring_flash_attn")
    sweep_plan = planned(gpus(1), strategies, mode="replay", cluster__world_size=4, loss="untiled")
    assert [entry.cell.running_ranks for entry in sweep_plan.cells] == [range(1)] * 6
    (replay_note,) = (note for note in sweep_plan.notes if "replay" in note)
    assert "(deepspeed_ulysses rank 0 of 4, ring_flash_attn rank 0 of 4)" in replay_note
    forecast = Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model))
    assert forecast.total_s < 10 * 60  # three lengths of two strategies
    assert forecast.references == ()


def test_replay_is_planned_for_a_gpu_that_is_not_here():
    elsewhere = {"mode": "replay", "hardware": read_option("hardware", "a100_80gb"), "plan": True}
    sweep_plan = planned(TWO_CORES, ("ring",), ["8k"], cluster__world_size=4, **elsewhere)
    (entry,) = sweep_plan.cells
    assert (entry.cell.cluster.device, entry.room.usable) == ("cuda", usable_bytes(entry.cell, TWO_CORES))
    assert "(ring rank 0 of 4) on one a100_80gb; the time of" in " ".join(sweep_plan.notes)
    with pytest.raises(ConfigError, match="plan it with --plan, or take mode=predict"):
        planned(TWO_CORES, ("ring",), ["8k"], cluster__world_size=4, **{**elsewhere, "plan": False})


@pytest.mark.parametrize(("budget_s", "count"), [(100_000, 4), (100, 1)])
def test_lengths_to_decide_are_listed_once_with_their_degree(budget_s, count):
    values = {"engine": read_option("engine", "ddp"), "model": read_option("model", "qwen3_0_6b")}
    raws = [
        raw
        for degree, dtype in product((2, 4), ("bf16", "fp16"))
        for raw in raws_of(
            ("ring", "ulysses"),
            ("8k", "32k"),
            sp_degree=degree,
            dtype=dtype,
            measure__repeats_budget_s=budget_s,
            **values,
        )
    ]
    sweep_plan = plan(raws, gpus(4), single=False)
    lines = short_lines(Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model)))
    found = [re.findall(r"\d+k sp \d", line) for line in lines if "decided" in line]
    assert len(found) == count
    assert sorted(chain(*found)) == ["32k sp 2", "32k sp 4", "8k sp 2", "8k sp 4"]


def test_replayed_cpu_rank_may_use_all_memory():
    sweep_plan = planned(TWO_CORES, ("ring",), ["8k"], mode="replay", cluster__world_size=4)
    (cell,) = Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model)).cells
    assert cell.room.usable == TWO_CORES.memory_bytes


def test_base_is_sharded_if_one_gpu_may_lack_memory():
    sweep_plan = planned(gpus(8))
    assert short_of_memory(sweep_plan, gpus(8)) == []
    assert [
        note
        for note in sweep_plan.notes
        if note.startswith("local runs with dp_shard=8, one sequence per rank")
    ]
    bases = [entry.cell for entry in sweep_plan.cells if entry.cell.strategy == "local"]
    assert {(cell.dp_shard, cell.measure.trace, cell.measure.min_timed_steps) for cell in bases} == {
        (8, False, 1)
    }
    for values in ({"model": read_option("model", "qwen3_0_6b")}, {"dp_shard": 1}, {"engine__name": "ddp"}):
        bases = [entry.cell for entry in planned(gpus(8), **values).cells if entry.cell.strategy == "local"]
        assert {cell.dp_shard for cell in bases} == {1}


def test_base_is_sharded_over_the_ranks_of_comparable_cells():
    requests = ({"cluster__world_size": 4}, {"cluster__world_size": 8}, {"dp_replicate": 2})
    raws = [raw for values in requests for raw in raws_of((), ("64k",), **values)]
    sweep_plan = plan(raws, gpus(8), single=False, default_strategies=True)
    bases = [entry.cell for entry in sweep_plan.cells if entry.cell.strategy == "local"]
    assert sorted((cell.cluster.world_size, cell.dp_shard) for cell in bases) == [(4, 4), (8, 4), (8, 8)]
    own = planned(gpus(8), lengths=["64k"], measure__min_timed_steps=6)
    assert {entry.cell.measure.min_timed_steps for entry in own.cells} == {6}
    assert "dp_shard" not in " ".join(planned(gpus(1)).notes)
    assert "dp_shard" not in " ".join(planned(TWO_CORES, kernel="flash_attn_3").notes)


def test_base_under_zero3_is_sharded_once_over_all_ranks():
    sweep_plan = planned(gpus(8), lengths=["96k"], dp_replicate=2, engine=read_option("engine", "zero3"))
    bases = [entry.cell for entry in sweep_plan.cells if entry.cell.strategy == "local"]
    assert [(cell.dp_replicate, cell.dp_shard) for cell in bases] == [(1, 8)]


def test_replicas_under_zero3_are_noted_and_run_once():
    def replicated(engine):
        words = (f"engine={engine}", "sp_degree=2", "cluster.world_size=4", "sweep_dir=x")
        raws = [make_raw(*words, f"dp_replicate={count}") for count in (1, 2)]
        sweep_plan = plan(raws, TWO_CORES, single=False)
        return len(sweep_plan.cells), [note for note in sweep_plan.notes if "dp_replicate" in note]

    reason = "because the engine shards over all ranks and keeps no replicas"
    assert replicated("zero3") == (1, [f"engine=zero3: dp_replicate=2 counts as dp_shard, {reason}"])
    assert replicated("fsdp2") == (2, [])


MACHINES = {
    "1 H100": (gpus(1), {}, set()),
    "4 H100": (gpus(4), {}, {98304}),
    "8 H100": (gpus(8), {}, {98304}),
    "one 4090": (gpus(1, "NVIDIA GeForce RTX 4090"), {}, set()),
}


@pytest.mark.parametrize("where", MACHINES)
def test_readme_command_takes_less_than_35_minutes(where):
    machine, values, decided = MACHINES[where]
    sweep_plan = planned(machine, **values)
    forecast = Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model))
    repeats = [entry for entry in forecast.repeats if entry.added]
    assert {entry.seq_len for entry in repeats} == decided
    took_s = forecast.total_s + sum(entry.added_s for entry in repeats)
    assert took_s < 35 * 60


def test_illegal_cell_needs_no_memory():
    refused = planned(gpus(4), strategies=("local",), lengths=["1m"], dtype="fp16")
    assert short_of_memory(refused, gpus(4)) == []


def test_memory_warnings_on_a_cpu_need_a_limit():
    limited = planned(TWO_CORES, cluster__memory_limit_gib=0.2)
    short = [entry[:2] for entry in short_of_memory(limited, TWO_CORES)]
    assert short == [("local", "64k"), *((name, "96k") for name in default_strategies())]
    assert short_of_memory(planned(TWO_CORES), TWO_CORES) == []


@pytest.mark.parametrize(("count", "taken"), [(3, 2), (6, 4)])
def test_three_or_six_gpus_run_default_cells_and_note_idle_gpus(count, taken):
    sweep_plan = planned(gpus(count))
    cells = [entry.cell for entry in sweep_plan.cells]
    assert [refusal(cell) for cell in cells] == [None] * 9
    assert {cell.sp_degree for cell in cells if cell.strategy != "local"} == {taken}
    (idle_note,) = [note for note in sweep_plan.notes if "stay idle" in note]
    assert idle_note.startswith(f"cluster.world_size=auto: {taken} of {count} GPUs")
    assert f"cluster.world_size={count} lets all share a sequence" in idle_note
    assert ("sp_degree=2 uses all in 3 groups" in idle_note) == (count == 6)


def test_note_on_rings_with_uneven_and_even_work():
    for strategies, expected in (
        (("ring", "ulysses"), []),
        (("ulysses", "ringmaster_ring"), []),
        (
            ("ring", "ringmaster_ring"),
            ["layout: causal work is uneven with ringmaster_ring and even with ring"],
        ),
    ):
        notes = planned(TWO_CORES, strategies=strategies).notes
        assert [note.partition(";")[0] for note in notes if note.startswith("layout:")] == expected


FIRST_CHOICE = "cudnn, the first choice of torch's scaled_dot_product_attention on capability"
FLASH = "torch_flash, FlashAttention-2;"
NOT_HERE = f"{FLASH} cudnn is chosen on compute capability 9.0, 10.0, 10.3, and here it is"
PREDICTED = {"mode": "predict", "hardware": read_option("hardware", "h200_141gb")}
LARGE_HEADS = {"model": {**read_option("model", "qwen3_4b"), "head_dim": 256}}
KERNELS = [
    (gpus(1), {}, f"{FIRST_CHOICE} 9.0"),
    (gpus(4), {}, f"{FIRST_CHOICE} 9.0"),
    (gpus(8, "NVIDIA A100-SXM4-80GB"), {}, f"{NOT_HERE} 8.0"),
    (gpus(1, "NVIDIA B200"), {}, f"{FIRST_CHOICE} 10.0"),
    (gpus(1, "NVIDIA GeForce RTX 4090"), {}, f"{NOT_HERE} 8.9"),
    (TWO_CORES, {}, "torch_flash, the flash attention that torch has for CPUs"),
    (replace(gpus(4, "NVIDIA H20"), gpu_capabilities=("9.0",) * 4), {}, f"{FIRST_CHOICE} 9.0"),
    (gpus(4, "NVIDIA A10G"), {}, f"{NOT_HERE} unknown"),
    (replace(TWO_CORES, cudnn_fault="old"), PREDICTED, f"{FIRST_CHOICE} 9.0"),
    (gpus(4), {"dtype": "fp32"}, f"{FLASH} no fused kernel has dtype=fp32 on a GPU, kernel=math has"),
    (gpus(4), LARGE_HEADS, f"{FLASH} cudnn does not take model.head_dim=256"),
    (gpus(4), {"data__packing": "documents"}, f"{FLASH} cudnn would compute one document after another"),
    (replace(gpus(4), cudnn_fault="old"), {}, f"{FLASH} old"),
]


@pytest.mark.parametrize(("machine", "values", "expected"), KERNELS)
def test_auto_kernel_and_its_reason(machine, values, expected):
    sweep_plan = planned(machine, ("ulysses", "torch_cp"), ["8k"], **values)
    lines = [note for note in sweep_plan.notes if note.startswith("kernel=auto")]
    assert lines == [f"kernel=auto: {expected}"]
    assert {entry.cell.kernel for entry in sweep_plan.cells} == {expected.partition(",")[0]}


def test_only_a_plan_on_the_cudnn_of_auto_can_change_its_kernel():
    def can_change(machine, *kernels, names=("ring",)):
        raws = [raw for kernel in kernels for raw in raws_of(names, ["8k"], kernel=kernel)]
        return plan(raws, machine, single=False).plan_again is not None

    assert can_change(gpus(4), "auto")
    assert not can_change(gpus(4), "auto", "cudnn")
    assert not can_change(gpus(4), "auto", names=["ring_self_attention"])
    assert not can_change(gpus(8, "NVIDIA A100-SXM4-80GB"), "auto")


def test_plan_notes_another_kernel_and_the_stand_in():
    def notes(*strategies, **values):
        lines = planned(gpus(4), strategies, ["8k"], **values).notes
        return [line for line in lines if "like for like" in line or "stand-in" in line]

    other, stand_in = notes("ring_self_attention", "ring", "ring_flash_attn")
    assert other.startswith("kernel=auto: ring_self_attention runs on math, not like for like")
    assert stand_in.startswith("stand-in for flash-attn: ring_flash_attn on kernel=cudnn (docs")
    assert notes("ring_self_attention", kernel="math") == []
    assert notes("ring_flash_attn", dtype="fp32") == []  # refused
    assert notes("ring_flash_attn", kernel="flash_attn_2") == []
    assert notes("ring_flash_attn", **PREDICTED) == []


@pytest.mark.parametrize(
    ("machine", "values", "expected"),
    [
        (gpus(4), {}, ["on for GPU ranks"]),
        (TWO_CORES, {}, ["off for CPU ranks"]),
        (gpus(4), {"checkpointing": True}, []),
        (gpus(4), {"workload__name": "attention"}, []),
    ],
)
def test_auto_checkpointing_follows_the_device_with_a_note(machine, values, expected):
    sweep_plan = planned(machine, lengths=["8k"], **values)
    is_on = machine is not TWO_CORES and "workload__name" not in values
    assert {entry.cell.checkpointing for entry in sweep_plan.cells} == {is_on}
    lines = [note for note in sweep_plan.notes if note.startswith("checkpointing=auto")]
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == expected


def test_note_on_a_gpu_without_file_whose_own_memory_counts():
    sweep_plan = planned(gpus(4, "NVIDIA A10G"), lengths=["8k"])
    assert {entry.cell.hardware for entry in sweep_plan.cells} == {"unknown"}
    assert "no file of conf/hardware/ names NVIDIA A10G, so MFU is unknown" in " ".join(sweep_plan.notes)
    forecast = Forecast(sweep_plan, sweep_plan.cells, Estimate(expected_by_cost_model))
    assert {entry.room.usable for entry in forecast.cells} == {24 * 2**30}


def test_command_notes_left_out_strategies_and_expected_time(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(run_sweep, "this_machine", lambda: gpus(1))
    monkeypatch.setattr(run_sweep, "run_plan", lambda sweep_plan, *_, **__: plans.append(sweep_plan) or 0)
    for words in ((), ("strategy=local,ring", "seq_len=8k,1001", "pad=false")):
        assert run_command_here(tmp_path, "-m", "seq_len=8k", *words).returncode == 0
    unnamed, named = plans
    assert (len(unnamed.cells), len(named.cells)) == (2, 4)
    assert [any(note.startswith("left out") for note in each_plan.notes) for each_plan in plans] == [
        True,
        False,
    ]
    expected = "\n".join(named.notes)
    assert re.search(
        r"^expected: about \d+ \w+ by the cost model.* of it for one process of each cell; --plan lists",
        expected,
        re.MULTILINE,
    )


@pytest.mark.parametrize(("trainer", "engine"), [("native", "fsdp2"), ("accelerate", "zero3")])
def test_auto_engine_is_the_same_for_all_cells(trainer, engine):
    trainers = ({"trainer__name": "native"}, {"trainer__name": trainer})
    raws = [raw for values in trainers for raw in raws_of(["deepspeed_ulysses"], ["1k"], **values)]
    sweep_plan = plan(raws, TWO_CORES, single=False)
    assert {entry.cell.engine.name for entry in sweep_plan.cells} == {engine}


@pytest.mark.parametrize("words", ["trainer=accelerate", "offload.optimizer=true"])
def test_max_length_is_planned_with_what_needs_zero3(words):
    raw = make_raw("experiment=max_length", "sweep_dir=out", words)
    sweep_plan = plan([raw], TWO_CORES, single=False)
    assert {entry.cell.engine.name for entry in sweep_plan.cells} <= {"zero3", "none"}


def test_folders_of_texts_are_stated_once_with_what_is_left_out(tmp_path):
    for name in ("a/rows.jsonl", "a/README.md", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    words = [f"data.path={tmp_path}/{name}" for name in ("a", "b", "a/rows.jsonl")]
    requests = [make_raw(word, f"seq_len={n}", "sweep_dir=x") for word in words for n in (256, 512)]
    notes = plan(requests, TWO_CORES, single=False).notes
    assert [note for note in notes if note.startswith("data.path")] == [
        f"{words[0]}: 1 of 2 files are trained on (*.jsonl); left out: README.md",
        f"{words[1]}: 1 of 1 files are trained on (*.txt)",
    ]
    attention = make_raw(words[0], "workload=attention", "sweep_dir=x")
    assert not any("trained on" in note for note in plan([attention], TWO_CORES, single=False).notes)
