"""What a plan says before its first cell: what was picked, what was left out, what will run out of memory."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import run_sweep
from bench.request.choices import default_strategies, read_option
from bench.sweep import run as sweep_run
from bench.sweep.plan import plan
from bench.sweep.progress import Progress
from bench.sweep.run import run_plan
from bench.sweep.shortage import MOST_NAMED
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


def short_of_memory(found):
    return [note.split(":")[0].strip() for note in found.notes if " per rank" in note]


def test_one_gpu_compares_local_with_itself_and_says_what_the_others_need():
    found = planned(gpus(1))
    kept = {(each.cell.strategy, each.cell.seq_len, each.cell.checkpointing) for each in found.cells}
    assert kept == {("local", 1024 * k, flag) for k in (8, 64, 96) for flag in (True, False)}
    assert found.notes[0].startswith("left out: deepspeed_ulysses, ring_flash_attn, whose ranks share")
    assert "cluster.ranks_per_gpu" in found.notes[0]
    assert found.notes[0].endswith("local with checkpointing on and off")
    assert short_of_memory(found) == ["local 64k, checkpointing off", "local 96k, checkpointing off"]
    assert "GiB with checkpointing=true" in found.notes[-1]


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
    assert short_of_memory(found) == [f"local {length}, checkpointing on" for length in ("64k", "96k", "8k")]
    assert "2 cells are estimated to run out of memory" in found.notes[-5]
    assert found.notes[-2].startswith("1 cell is undecided by the estimate")
    assert "mostly states, and has 79.1 GiB per rank" in found.notes[-1]


def test_without_checkpointing_most_of_it_would_not_fit():
    """As it was planned by default once: on four GPUs 64k and 96k of every strategy."""
    assert short_of_memory(planned(gpus(4), checkpointing=False)) == [
        *(f"local {length}, checkpointing off" for length in README),
        *(f"deepspeed_ulysses {length} on 4 ranks, checkpointing off" for length in README[1:]),
        *(f"ring_flash_attn {length} on 4 ranks, checkpointing off" for length in README[1:]),
    ]


def test_an_illegal_cell_needs_nothing_and_many_short_ones_are_counted():
    lengths = [f"{100 + number}k" for number in range(MOST_NAMED + 3)]
    found = planned(gpus(4), strategies=("local",), lengths=lengths)
    assert len(short_of_memory(found)) == MOST_NAMED
    assert found.notes[-1] == "  and 3 more"
    refused = planned(gpus(4), strategies=("local",), lengths=["1m"], dtype="fp16")
    assert short_of_memory(refused) == []
    no_ring = planned(gpus(4), strategies=("usp",), lengths=["8m"], ulysses_degree=8, kernel="math")
    assert short_of_memory(no_ring) == []


def test_a_cpu_warns_of_a_limit_and_of_nothing_else():
    limited = planned(TWO_CORES, cluster__memory_limit_gib=0.2)
    assert short_of_memory(limited) == [
        "local 64k, checkpointing off",
        "local 96k, checkpointing off",
        "deepspeed_ulysses 96k on 2 ranks, checkpointing off",
        "ring_flash_attn 96k on 2 ranks, checkpointing off",
    ]
    assert short_of_memory(planned(TWO_CORES)) == []


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
    shared = [f"{name} 8k on 4 ranks, checkpointing on" for name in ("deepspeed_ulysses", "ring_flash_attn")]
    assert short_of_memory(found) == ["local 8k, checkpointing on", *shared]
    assert "2 cells are undecided" in found.notes[-3]
    assert "24.0 GiB per rank" in found.notes[-1]


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
