"""What a sweep says before its first cell: what was chosen and left out, and what will run out of memory."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import run_sweep
from bench.cost.fit import Fit
from bench.labels import length_label
from bench.request.choices import default_strategies, read_option
from bench.request.legality import refusal
from bench.sweep import run as sweep_run
from bench.sweep.estimate import Estimate
from bench.sweep.expected import modelled
from bench.sweep.forecast import Forecast
from bench.sweep.plan import plan
from bench.sweep.plan_lines import RUNS_ANYWAY, short_lines, whole_plan
from bench.sweep.progress import Progress
from bench.sweep.run import run_plan
from tests.cells import FOUR_H100, TWO_CORES, raw_with
from tests.command import typed_here

README = ("8k", "64k", "96k")
H100 = FOUR_H100.gpus[0]


def gpus(count, name=H100):
    return replace(FOUR_H100, gpus=(name,) * count, gpu_memory_bytes=(24 * 2**30,) * count)


def raws(strategies=(), lengths=README, **values):
    names = strategies or default_strategies()
    changed = {key.replace("__", "."): value for key, value in values.items()}
    return [
        raw_with(
            {"strategy": read_option("strategy", name), "seq_len": length, "sweep_dir": "out", **changed}
        )
        for name in names
        for length in lengths
    ]


def planned(machine, **values):
    """As `python run_sweep.py -m seq_len=...` plans it, or with strategies named."""
    is_default = "strategies" not in values
    return plan(raws(**values), machine, single=False, default_strategies=is_default)


def short_of_memory(found, machine):
    """The cells that do not surely fit, as the table of `--plan` and the short lines tell them."""
    forecast = Forecast(found, found.cells, machine, Estimate(modelled))
    short = [each for each in forecast.cells if each.room and each.room.fit is not Fit.FITS]
    told = [line for line in short_lines(forecast) if RUNS_ANYWAY in line]
    assert sum(int(line.split()[0]) for line in told) == len(short)
    return [(each.cell.strategy, length_label(each.cell.seq_len), str(each.room.fit)) for each in short]


def test_one_gpu_compares_local_with_itself_and_says_what_the_others_need():
    found = planned(gpus(1))
    kept = {(each.cell.strategy, each.cell.seq_len, each.cell.checkpointing) for each in found.cells}
    assert kept == {("local", 1024 * k, flag) for k in (8, 64, 96) for flag in (True, False)}
    assert found.notes[0].startswith("left out: deepspeed_ulysses, ring_flash_attn, whose ranks share")
    assert "cluster.ranks_per_gpu" in found.notes[0]
    assert found.notes[0].endswith("local with checkpointing on and off")
    assert {length for _, length, _ in short_of_memory(found, gpus(1))} == {"64k", "96k"}
    forecast = Forecast(found, found.cells, gpus(1), Estimate(modelled))
    assert "GiB with checkpointing=true" in "\n".join(whole_plan(forecast, raws()))


WHOLE = {
    "four GPUs": (gpus(4), {}),
    "eight GPUs": (gpus(8), {}),
    "ranks that share one": (gpus(1), {"cluster__ranks_per_gpu": 4}),
    "a CPU": (TWO_CORES, {}),
    "one CPU rank": (TWO_CORES, {"cluster__world_size": 1}),
    "strategies somebody named": (gpus(1), {"strategies": ("local", "deepspeed_ulysses", "ring_flash_attn")}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_everywhere_else_the_sweep_stays_whole(case):
    machine, values = WHOLE[case]
    found = planned(machine, **values)
    assert len(found.cells) == 9
    assert not [note for note in found.notes if note.startswith("left out")]


def test_one_gpu_keeps_to_the_checkpointing_that_was_named():
    found = planned(gpus(1), checkpointing=False)
    assert [each.cell.checkpointing for each in found.cells] == [False] * 3
    assert found.notes[0].endswith("cluster.ranks_per_gpu=4")


@pytest.mark.parametrize("count", [4, 8])
def test_the_readmes_sweep_on_80_gb_fits_but_for_a_4b_model_on_one_rank(count):
    found = planned(gpus(count))
    told = {"8k": "undecided", "64k": "out_of_memory", "96k": "out_of_memory"}
    assert short_of_memory(found, gpus(count)) == [("local", *each) for each in told.items()]


def test_an_illegal_cell_needs_nothing():
    refused = planned(gpus(4), strategies=("local",), lengths=["1m"], dtype="fp16")
    assert short_of_memory(refused, gpus(4)) == []
    no_ring = planned(gpus(4), strategies=("usp",), lengths=["8m"], ulysses_degree=8, kernel="math")
    assert short_of_memory(no_ring, gpus(4)) == []


def test_a_cpu_warns_of_a_limit_and_of_nothing_else():
    limited = planned(TWO_CORES, cluster__memory_limit_gib=0.2)
    short = [each[:2] for each in short_of_memory(limited, TWO_CORES)]
    assert short == [("local", "64k"), *((name, "96k") for name in default_strategies())]
    assert short_of_memory(planned(TWO_CORES), TWO_CORES) == []


@pytest.mark.parametrize(("count", "taken"), [(3, 2), (5, 4), (6, 4), (7, 4)])
def test_on_an_odd_number_of_gpus_no_default_cell_is_refused_and_the_plan_says_who_is_idle(count, taken):
    found = planned(gpus(count))
    cells = [each.cell for each in found.cells]
    assert [refusal(cell) for cell in cells] == [None] * 9
    assert {cell.sp_degree for cell in cells if cell.strategy != "local"} == {taken}
    (said,) = [note for note in found.notes if "stay idle" in note]
    assert said.startswith(f"cluster.world_size=auto: {taken} of {count} GPUs")
    assert f"cluster.world_size={count} lets all share a sequence" in said
    assert ("sp_degree=2 takes all in 3 groups" in said) == (count == 6)


@pytest.mark.parametrize(
    ("count", "values", "ranks"),
    [
        (6, {"sp_degree": 2}, (2, 3, 6)),
        (7, {"sp_degree": 2}, (2, 3, 6)),
        (6, {"dp_shard": 3}, (2, 3, 6)),
        (4, {"sp_degree": 2, "dp_shard": 1}, (2, 1, 2)),
        (6, {"cluster__world_size": 6}, (6, 1, 6)),
        (4, {"sp_degree": 8}, (8, 1, 4)),
        (8, {}, (8, 1, 8)),
    ],
)
def test_degrees_that_are_given_take_as_many_gpus_as_they_need(count, values, ranks):
    cell = planned(gpus(count), strategies=("ring",), lengths=["96k"], **values).cells[0].cell
    assert (cell.sp_degree, cell.dp_shard, cell.cluster.world_size) == ranks


NEWER = "kernel=torch_flash is FlashAttention-2; on "


UNEVEN = (
    "causal work is uneven with ringmaster_ring, whose last rank has up to 1.5 times the mean, and even with"
    " ring; alike: layout=contiguous for all, or strategy.rotation=head_tail for ringmaster_ring"
)


@pytest.mark.parametrize(
    ("strategies", "said"),
    [
        (("ring", "ulysses"), None),
        (("ulysses", "ringmaster_ring"), None),
        (
            ("ring", "ringmaster_ring"),
            UNEVEN,
        ),
    ],
)
def test_contiguous_rings_beside_balanced_ones_are_named(strategies, said):
    notes = [line for line in planned(TWO_CORES, strategies=strategies).notes if line.startswith("layout:")]
    assert notes == ([] if said is None else [f"layout: {said}"])


@pytest.mark.parametrize(
    ("machine", "values", "said"),
    [
        (gpus(4), {}, f"{NEWER}Hopper FlashAttention-3 or cuDNN is likely faster"),
        (gpus(4, "NVIDIA B200"), {}, f"{NEWER}Blackwell FlashAttention-4 or cuDNN is likely faster"),
        (replace(gpus(4, "NVIDIA H20"), gpu_capabilities=("9.0",) * 4), {}, f"{NEWER}Hopper"),
        (TWO_CORES, {"mode": "predict", "hardware": read_option("hardware", "h200_141gb")}, f"{NEWER}Hopper"),
        (gpus(4, "NVIDIA A100-SXM4-80GB"), {}, None),
        (gpus(4, "NVIDIA A10G"), {}, None),
        (gpus(4), {"kernel": "cudnn"}, None),
        (gpus(4), {"kernel": "math"}, None),
        (TWO_CORES, {}, None),
    ],
)
def test_on_newer_gpus_the_plan_says_that_there_are_likely_faster_kernels(machine, values, said):
    notes = planned(machine, lengths=["8k"], strategies=("ulysses",), **values).notes
    told = [note for note in notes if "FlashAttention" in note]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith(said)
        assert told[0].endswith("python run_sweep.py -m kernel=torch_flash,cudnn seq_len=8k,32k")


def test_whoever_compares_kernels_is_told_of_none():
    both = [each for kernel in ("torch_flash", "cudnn") for each in raws(("ulysses",), ["8k"], kernel=kernel)]
    assert "FlashAttention" not in " ".join(plan(both, gpus(4), single=False).notes)


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
    forecast = Forecast(found, found.cells, gpus(4, "NVIDIA A10G"), Estimate(modelled))
    assert {each.room.usable for each in forecast.cells} == {24 * 2**30}


@pytest.mark.parametrize(("words", "cells"), [((), 2), (("strategy=local,ring",), 2)])
def test_the_command_knows_whether_somebody_named_a_strategy(tmp_path, monkeypatch, words, cells):
    plans = []
    monkeypatch.setattr(run_sweep, "this_machine", lambda: gpus(1))
    monkeypatch.setattr(run_sweep, "run_plan", lambda found, *_, **__: plans.append(found) or 0)
    assert typed_here(tmp_path, "-m", "seq_len=8k", *words).returncode == 0
    (found,) = plans
    assert len(found.cells) == cells
    assert any(note.startswith("left out") for note in found.notes) == (not words)


class Idle:
    is_local = True

    def warm(self):
        pass


def test_a_sweep_says_its_notes_before_the_first_cell(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    said = io.StringIO()
    found = replace(planned(gpus(1)), folder=tmp_path, open_cells=())
    monkeypatch.setattr(sweep_run, "_run_one", interrupted)
    run_plan(found, Idle(), Progress(Console(file=said, width=200)), write_report=lambda _: True)
    lines = said.getvalue().splitlines()
    assert [line for line in lines if line in found.notes] == [*found.notes]
    assert lines.index(found.notes[-1]) < lines.index("interrupted; no cell has ended yet")
