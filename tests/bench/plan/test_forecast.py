"""The forecast of a plan, and the text of `--plan`, which runs nothing."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

import run_sweep
from bench.common.environment import REPOSITORY, Machine
from bench.config import AUTO
from bench.extras.predict.prediction import expected_by_cost_model
from bench.measure import planned_stages
from bench.plan.auto_choices import AUTO_KEYS
from bench.plan.estimate import FIXED_S, START_S, Estimate, ExpectedStep
from bench.plan.forecast import Forecast
from bench.plan.plan import plan
from bench.plan.plan_lines import short_lines, whole_plan
from bench.request.choices import read_option
from bench.run.cell.launcher import Launcher
from tests.support.cells import FOUR_H100, TWO_CORES, make_raw, raws_of
from tests.support.command import NO_GPU, run_command_here
from tests.support.records import read_lines

REFERENCE = REPOSITORY / "results" / "reference" / "cpu" / "records.jsonl"
ITS_MACHINE = Machine(gpus=(), cores=2, cpu="Intel Xeon", memory_bytes=2**34)
GPUS = replace(FOUR_H100, gpu_memory_bytes=(80 * 2**30,) * 4)


def forecast(
    machine=TWO_CORES, lengths=("8k", "64k", "96k"), strategies=(), step_s=expected_by_cost_model, **values
):
    planned = plan(raws_of(strategies, lengths, **values), machine, single=False)
    return Forecast(planned, planned.cells, Estimate(step_s))


def one_second(_):
    return ExpectedStep(1.0, "a clock")


def lines_of(result):
    return "\n".join(whole_plan(result, raws_of(["ring"], ["8k"])))


def test_forecast_of_the_readme_sweep_is_close_to_its_records():
    result = forecast(ITS_MACHINE)
    measured_s = sum(record["wall_s"] for record in read_lines(REFERENCE))
    assert max(result.total_s / measured_s, measured_s / result.total_s) < 1.4  # another CPU's rates
    assert result.unknown_count == 0
    assert "another CPU" in result.bases[0]


def test_plan_warns_of_a_cell_that_exceeds_its_timeout():
    result = forecast(lengths=["8k"], strategies=["local"], step_s=one_second, measure__timeout_s=20)
    assert "1 cell will not be done within measure.timeout_s=20" in lines_of(result)


def test_forecast_counts_a_cell_that_does_not_fit_once():
    single, repeated = (forecast(GPUS, measure__repeats=repeats) for repeats in (1, 6))
    (out_of_memory,) = (entry for entry in single.cells if entry.runs_out_of_memory)
    assert (out_of_memory.cell.strategy, out_of_memory.cell.seq_len, out_of_memory.cell_s) == (
        "local",
        98304,
        FIXED_S["cuda"],
    )
    assert single.total_s == pytest.approx(START_S + sum(entry.cell_s for entry in single.cells))
    lasting_s = sum(entry.cell_s for entry in single.cells if entry.runs_to_end)
    assert repeated.total_s == pytest.approx(START_S + out_of_memory.cell_s + 6 * lasting_s)
    assert single.bases == ["the cost model on hardware=h100_80gb"]
    fits = re.findall(r"^\w+ \d+k .*  (fits|undecided|does not fit)\b", lines_of(single), re.MULTILINE)
    assert Counter(fits) == {"fits": 7, "undecided": 1, "does not fit": 1}


def test_forecast_on_gpus_includes_time_outside_of_steps():
    """Start, model and traces take 15 to 40 s."""
    result = forecast(GPUS)
    for entry in (entry for entry in result.cells if entry.runs_to_end):
        steps = sum(stage.steps for stage in planned_stages(entry.cell.measure, entry.step.seconds))
        assert 15 <= entry.cell_s - steps * entry.step.seconds <= 40
    assert result.total_s >= sum(entry.cell_s for entry in result.cells if entry.runs_to_end)


def test_forecast_skips_a_reference_that_cannot_fit():
    result = forecast(GPUS, strategies=["ulysses"], lengths=["8k", "96k"])
    assert [cell.seq_len for cell in result.references] == [8192]
    assert len(result.skipped_references) == 1
    assert "96k: local does not run as a reference, because a rank needs" in lines_of(result)


def test_cpu_ranks_share_memory_and_unknown_times_are_stated():
    result = forecast(lengths=["1k"], strategies=["ulysses"], model=read_option("model", "qwen3_4b"))
    (cell,) = result.cells
    assert cell.room.usable == TWO_CORES.memory_bytes // 2
    assert cell.runs_out_of_memory
    assert "memory that a rank may use: 8.0 GiB (cpu, ranks=2)" in lines_of(result)
    assert "CPU ranks share this host's memory; cluster.memory_limit_gib=..." in lines_of(result)
    unknown = forecast(lengths=["8k"], strategies=["ring"], kernel="math")
    assert unknown.cells[0].step is None
    assert "an unknown time" in lines_of(unknown)
    assert "no file of conf/hardware/ has rates" in lines_of(unknown)


def test_references_are_listed_and_stay_within_their_budget():
    without_reference = forecast(
        lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=0
    )
    with_reference = forecast(
        lengths=["64k"], strategies=["ring"], step_s=one_second, measure__reference_budget_s=3
    )
    assert (without_reference.references, len(with_reference.references)) == ((), 1)
    # Without the budget it would be 4 s: two steps, and 2 s outside of steps.
    assert with_reference.total_s - without_reference.total_s == 3
    assert "reference local 64k" in lines_of(with_reference)
    with_base = forecast(lengths=["64k"], strategies=["local", "ring"], step_s=one_second)
    assert with_base.references == ()


def test_plan_states_every_automatic_choice():
    open_keys = {
        f"{key}.{name}" if name else key
        for key, value in make_raw().items()
        for name, setting in (value.items() if isinstance(value, dict) else [("", value)])
        if setting == AUTO
    }
    assert {*AUTO_KEYS} == open_keys - {"cluster.name"}  # `cluster.device` shows it
    text = lines_of(forecast(lengths=["8k"], strategies=["ring", "usp"]))
    lines = [line for line in text.splitlines() if re.match("cells run with|automatic choices in all", line)]
    in_all = {word.partition("=")[0] for word in " ".join(lines).split()}
    assert {key.removesuffix(".name") for key in AUTO_KEYS} - in_all == {
        "ulysses_degree",
        "sp_degree",
        "replay.rank",
        "model.rope_scaling",
        "model.rope_factor",
    }
    assert "ulysses_degree=2" in text


def test_predicted_plan_states_the_time_of_measuring():
    h100 = read_option("hardware", "h100_80gb")
    result = forecast(strategies=["ring", "ulysses"], mode="predict", hardware=h100, cluster__world_size=4)
    measured = forecast(GPUS, strategies=["ring", "ulysses"], measure__reference_budget_s=0)
    assert result.total_s == pytest.approx(measured.total_s)
    lengths = [98304, 65536, 8192]
    assert [entry.seq_len for entry in result.repeats] == lengths
    assert [entry.seq_len for entry in measured.repeats] == lengths
    assert "measuring these cells would take about" in lines_of(result)


def test_predicted_cells_take_no_time_and_share_reasons():
    h100 = read_option("hardware", "h100_80gb")
    result = forecast(lengths=["1001"], strategies=["ring", "usp"], mode="predict", hardware=h100)
    assert not any(entry.runs for entry in result.cells)
    assert short_lines(result) == []
    reasons = {str(entry.reason) for entry in result.illegal}
    text = lines_of(result)
    assert {(entry.step, entry.cell_s) for entry in result.cells} == {(None, None)}
    assert [text.count(f"] {reason}\n") for reason in reasons] == [1] * len(reasons)
    assert len(re.findall(r"unsupported \[\d\]$", text, re.MULTILINE)) == 2


def test_plan_option_lists_cells_and_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(Launcher, "__init__", lambda *_: pytest.fail("a plan needs no launcher"))
    monkeypatch.setattr(run_sweep, "this_machine", lambda: TWO_CORES)
    words = ("-m", "seq_len=2k,1k,1001", "strategy=ring", "measure.repeats=2", "--plan")
    done = run_command_here(tmp_path, *words)
    assert (done.returncode, done.stderr, [*tmp_path.iterdir()]) == (0, "", [])
    rows = re.findall(r"^(ring \S+ sp 2(?: repeat 2)?)  ", done.stdout, flags=re.MULTILINE)
    assert [name for name in rows if "repeat" not in name] == [
        "ring 1001 sp 2",
        "ring 1k sp 2",
        "ring 2k sp 2",
    ]
    assert sorted(rows[3:]) == ["ring 1001 sp 2 repeat 2", "ring 1k sp 2 repeat 2", "ring 2k sp 2 repeat 2"]
    assert "[1] seq_len=1001 must be a multiple of 4" in done.stdout
    assert "the nearest is seq_len=1000" in done.stdout
    refused = run_command_here(tmp_path, "--plan", "seq_len=1001", "strategy=ring")
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
