"""Step times of a plan on a CPU, from a probe of that CPU."""

from dataclasses import replace

import pytest

import run_sweep
from bench.extras.predict import cpu_speed, prediction
from bench.extras.predict.cpu_speed import MAX_TASKS, ProbeTask, ProbeTimes, run_probe, step_s_on_this_cpu
from bench.extras.predict.hardware_file import another_cpu
from bench.extras.predict.prediction import PROBED, expected_after_probe, expected_by_cost_model, predict
from bench.plan.planned import planned_cell
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell

TIMES = ProbeTimes(0.2, 0.01)


def cell(*words, machine=TWO_CORES):
    return make_cell("strategy=ulysses", "seq_len=8k", *words, machine=machine)


def test_run_probe_times_attention_and_products(monkeypatch):
    task = ProbeTask.for_cell(cell())
    assert (task.ranks, task.threads, task.heads) == (2, 1, 1)
    times = run_probe([task, task])[task]
    assert 0 < times.attention_s < 30
    assert 0 < times.products_s < 30
    monkeypatch.setattr(cpu_speed.sys, "executable", "/nowhere/python")
    assert expected_after_probe([cell()])(cell()) == expected_by_cost_model(cell())
    monkeypatch.setattr(cpu_speed.subprocess, "run", None)
    assert run_probe(replace(task, heads=heads) for heads in range(MAX_TASKS + 1)) == {}


@pytest.mark.parametrize(("attention", "products"), [(2, 1), (1, 2)])
def test_step_s_on_this_cpu_scales_with_the_probe(attention, products):
    probed, other = cell(), another_cpu()
    parts = predict(probed, other, None).parts
    once = step_s_on_this_cpu(probed, parts, other, TIMES)
    longer = ProbeTimes(attention * TIMES.attention_s, products * TIMES.products_s)
    twice = step_s_on_this_cpu(probed, parts, other, longer)
    rest_s = step_s_on_this_cpu(probed, replace(parts, attention_ms=0.0), other, TIMES)
    assert 0 < rest_s < once
    assert twice == pytest.approx(attention * (once - rest_s) + products * rest_s)


def test_timed_here_probes_only_cells_on_this_cpu(monkeypatch):
    tasks = []
    monkeypatch.setattr(
        prediction, "run_probe", lambda wanted: tasks.extend(wanted) or dict.fromkeys(tasks, TIMES)
    )
    elsewhere = cell(machine=FOUR_H100)
    expected = expected_after_probe([cell(), cell("mode=predict", "hardware=h100_80gb"), elsewhere])
    assert len(tasks) == 1
    assert expected(cell()).basis == PROBED
    assert expected(cell()).seconds != expected_by_cost_model(cell()).seconds
    assert expected(elsewhere) == expected_by_cost_model(elsewhere)


def test_run_sweep_probes_for_legal_cells_only(monkeypatch):
    timed = []
    monkeypatch.setattr(run_sweep, "PROBE_WORTHWHILE_S", 0.0)
    probe = lambda cells: timed.extend(cells) or expected_by_cost_model  # noqa: E731
    monkeypatch.setattr(run_sweep, "expected_after_probe", probe)
    legal, illegal = (planned_cell(cell(*words), TWO_CORES) for words in ((), ("seq_len=1001",)))
    run_sweep.estimate_of([legal, illegal])
    assert (illegal.reason is not None, timed) == (True, [legal.cell])
