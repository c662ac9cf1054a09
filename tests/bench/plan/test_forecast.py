"""What a plan is expected to take, and what `--plan` says of it without running anything."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

import run_sweep
from bench.common.environment import REPOSITORY, Machine
from bench.config import AUTO
from bench.extras.predict.prediction import modelled
from bench.measure import planned_stages
from bench.plan.auto_choices import CHOICES
from bench.plan.estimate import FIXED_S, START_S, Estimate, Expected
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import short_lines, whole_plan
from bench.request.choices import read_option
from bench.run.cell.launcher import Launcher
from tests.support.cells import FOUR_H100, TWO_CORES, make_raw, raws_of
from tests.support.command import NO_GPU, typed_here
from tests.support.records import read_lines

REFERENCE = REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl"
ITS_MACHINE = Machine(gpus=(), cores=2, cpu="Intel Xeon", memory_bytes=2**34)
GPUS = replace(FOUR_H100, gpu_memory_bytes=(80 * 2**30,) * 4)


def forecast(machine=TWO_CORES, lengths=("8k", "64k", "96k"), strategies=(), step_s=modelled, **values):
    planned = plan(raws_of(strategies, lengths, **values), machine, single=False)
    return Forecast(planned, planned.cells, Estimate(step_s))


def one_second(_):
    return Expected(1.0, "a clock")


def lines_of(found):
    return "\n".join(whole_plan(found, raws_of(["ring"], ["8k"])))


def test_the_readmes_sweep_is_expected_to_take_what_it_took():
    found = forecast(ITS_MACHINE)
    took_s = sum(record["wall_s"] for record in read_lines(REFERENCE))
    assert max(found.total_s / took_s, took_s / found.total_s) < 1.4  # another CPU's rates
    assert found.unknown == 0
    assert "another CPU" in found.bases[0]


def test_cells_without_an_interval_are_counted():
    found = forecast(measure__repeats=1)
    assert {each.timed_steps for each in found.cells} == {1, 20}
    said = next(line for line in short_lines(found) if "measure.budget_s" in line)
    assert said.startswith("6 cells will have fewer than 6 timed steps")
    for enough in ({"measure__budget_s": 10**5}, {"measure__steps": 5}):
        assert forecast(measure__repeats=1, **enough).without_interval == 0


def test_a_cell_that_will_not_be_done_in_time_is_named():
    found = forecast(lengths=["8k"], strategies=["local"], step_s=one_second, measure__timeout_s=20)
    assert "1 cell will not be done within measure.timeout_s=20" in lines_of(found)


def test_a_cell_that_does_not_fit_ends_with_its_first_step_and_is_counted_once():
    once, often = (forecast(GPUS, measure__repeats=repeats) for repeats in (1, 6))
    (early,) = (each for each in once.cells if each.ends_early)
    assert (early.cell.strategy, early.cell.seq_len, early.cell_s) == ("local", 98304, FIXED_S["cuda"])
    assert once.total_s == pytest.approx(START_S + sum(each.cell_s for each in once.cells))
    lasting_s = sum(each.cell_s for each in once.cells if each.lasts)
    assert often.total_s == pytest.approx(START_S + early.cell_s + 6 * lasting_s)
    assert once.bases == ["the cost model on hardware=h100_80gb"]
    fits = re.findall(r"^\w+ \d+k .*  (fits|undecided|does not fit)\b", lines_of(once), re.MULTILINE)
    assert Counter(fits) == {"fits": 7, "undecided": 1, "does not fit": 1}


def test_the_minutes_of_gpus_count_what_a_cell_takes_outside_its_steps():
    """15 to 40 s by what starts, is built and is read."""
    found = forecast(GPUS)
    for each in (each for each in found.cells if each.lasts):
        steps = sum(stage.steps for stage in planned_stages(each.cell.measure, each.step.seconds))
        assert 15 <= each.cell_s - steps * each.step.seconds <= 40
    assert found.total_s >= sum(each.cell_s for each in found.cells if each.lasts)


def test_a_reference_that_cannot_fit_is_neither_counted_nor_listed():
    found = forecast(GPUS, strategies=["ulysses"], lengths=["8k", "96k"])
    assert [cell.seq_len for cell in found.references] == [8192]
    assert len(found.not_tried) == 1
    assert "96k: local does not run as a reference: a rank needs" in lines_of(found)


def test_cpu_ranks_share_the_hosts_memory_and_what_is_not_known_is_said_to_be():
    found = forecast(lengths=["1k"], strategies=["ulysses"], model=read_option("model", "qwen3_4b"))
    (cell,) = found.cells
    assert cell.room.usable == TWO_CORES.memory_bytes // 2
    assert cell.ends_early
    assert "memory that a rank may use: 8.0 GiB (cpu, ranks=2)" in lines_of(found)
    assert "CPU ranks share this host's memory; cluster.memory_limit_gib=..." in lines_of(found)
    unknown = forecast(lengths=["8k"], strategies=["ring"], kernel="math")
    assert unknown.cells[0].step is None
    assert "an unknown time" in lines_of(unknown)
    assert "no file of conf/hardware/ has rates" in lines_of(unknown)


def test_references_are_listed_and_take_no_longer_than_their_budget():
    alone = forecast(lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=0)
    beside = forecast(lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=3)
    assert (alone.references, len(beside.references)) == ((), 1)
    assert beside.total_s - alone.total_s == 3  # two steps and what every cell takes would be 4
    assert "reference local 64k" in lines_of(beside)
    with_base = forecast(lengths=["64k"], strategies=["local", "ring"], step_s=one_second)
    assert with_base.references == ()


def test_every_choice_that_may_be_left_open_is_told():
    open_keys = {
        f"{key}.{name}" if name else key
        for key, value in make_raw().items()
        for name, each in (value.items() if isinstance(value, dict) else [("", value)])
        if each == AUTO
    }
    assert {*CHOICES} == open_keys - {"cluster.name"}  # told by its device
    said = lines_of(forecast(lengths=["8k"], strategies=["ring", "usp"]))
    lines = [line for line in said.splitlines() if re.match("cells run with|automatic choices in all", line)]
    in_all = {word.partition("=")[0] for word in " ".join(lines).split()}
    assert {key.removesuffix(".name") for key in CHOICES} - in_all == {
        "ulysses_degree",
        "sp_degree",
        "replay.rank",
    }
    assert "ulysses_degree=2" in said


def test_where_nothing_runs_the_plan_says_what_measuring_would_take():
    h100 = read_option("hardware", "h100_80gb")
    found = forecast(strategies=["ring", "ulysses"], mode="predict", hardware=h100, cluster__world_size=4)
    measured = forecast(GPUS, strategies=["ring", "ulysses"], measure__reference_budget_s=0)
    assert found.total_s == pytest.approx(measured.total_s)
    assert [each.seq_len for each in found.repeats] == [each.seq_len for each in measured.repeats] == [
        98304, 65536, 8192,
    ]  # fmt: skip
    assert "measuring these cells would take about" in lines_of(found)


def test_predicted_cells_take_no_time_and_equal_reasons_are_one_note():
    h100 = read_option("hardware", "h100_80gb")
    found = forecast(lengths=["1001"], strategies=["ring", "usp"], mode="predict", hardware=h100)
    assert not any(each.runs for each in found.cells)
    assert short_lines(found) == []
    reasons = {str(each.reason) for each in found.illegal}
    said = lines_of(found)
    assert {(each.step, each.cell_s) for each in found.cells} == {(None, None)}
    assert [said.count(f"] {reason}\n") for reason in reasons] == [1] * len(reasons)
    assert len(re.findall(r"unsupported \[\d\]$", said, re.MULTILINE)) == 2


def test_the_command_lists_cells_in_order_says_what_is_illegal_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Launcher, "__init__", lambda *_: pytest.fail("a plan needs no launcher"))
    monkeypatch.setattr(run_sweep, "this_machine", lambda: TWO_CORES)
    words = ("-m", "seq_len=2k,1k,1001", "strategy=ring", "measure.repeats=2", "--plan")
    said = typed_here(tmp_path, *words)
    assert (said.returncode, said.stderr, [*tmp_path.iterdir()]) == (0, "", [])
    rows = re.findall(r"^(ring \S+ sp 2(?: repeat 2)?)  ", said.stdout, flags=re.MULTILINE)
    assert [name for name in rows if "repeat" not in name] == [
        "ring 1001 sp 2",
        "ring 1k sp 2",
        "ring 2k sp 2",
    ]
    assert sorted(rows[3:]) == ["ring 1001 sp 2 repeat 2", "ring 1k sp 2 repeat 2", "ring 2k sp 2 repeat 2"]
    assert "[1] seq_len=1001 must be a multiple of 4" in said.stdout
    assert "the nearest is seq_len=1000" in said.stdout
    refused = typed_here(tmp_path, "--plan", "seq_len=1001", "strategy=ring")
    assert (refused.returncode, [*tmp_path.iterdir()]) == (2, [])
    assert "must be a multiple of 4" in refused.stderr


def test_a_plan_imports_no_torch(tmp_path):
    environment = NO_GPU | {"PYTHONPATH": str(REPOSITORY)}
    code = "import sys, run_sweep\ntry: run_sweep.main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "--plan", "seq_len=1k"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
