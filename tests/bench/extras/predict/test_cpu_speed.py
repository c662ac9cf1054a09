"""A plan on a CPU rests on a timing of that CPU."""

from dataclasses import replace

import pytest

import run_sweep
from bench.extras.predict import cpu_speed, prediction
from bench.extras.predict.cpu_speed import MOST_TASKS, ProbeTask, ProbeTimes, probed, seconds_here
from bench.extras.predict.hardware_file import another_cpu
from bench.extras.predict.prediction import PROBED, modelled, predict, timed_here
from bench.plan.planned import planned_cell
from tests.support.cells import FOUR_H100, TWO_CORES, make_cell

TIMES = ProbeTimes(0.2, 0.01)


def cell(*words, machine=TWO_CORES):
    return make_cell("strategy=ulysses", "seq_len=8k", *words, machine=machine)


def test_a_child_process_times_attention_and_products_of_the_cells_ranks_and_threads(monkeypatch):
    task = ProbeTask.of(cell())
    assert (task.ranks, task.threads, task.heads) == (2, 1, 1)
    times = probed([task, task])[task]
    assert 0 < times.attention_s < 30
    assert 0 < times.products_s < 30
    monkeypatch.setattr(cpu_speed.sys, "executable", "/nowhere/python")
    assert timed_here([cell()])(cell()) == modelled(cell())
    monkeypatch.setattr(cpu_speed.subprocess, "run", None)
    assert probed(replace(task, heads=heads) for heads in range(MOST_TASKS + 1)) == {}


@pytest.mark.parametrize(("attention", "products"), [(2, 1), (1, 2)])
def test_a_step_takes_as_many_times_as_long_as_its_parts_do(attention, products):
    of, other = cell(), another_cpu()
    parts = predict(of, other, None).parts
    once = seconds_here(of, parts, other, TIMES)
    longer = ProbeTimes(attention * TIMES.attention_s, products * TIMES.products_s)
    twice = seconds_here(of, parts, other, longer)
    rest_s = seconds_here(of, replace(parts, attention_ms=0.0), other, TIMES)
    assert 0 < rest_s < once
    assert twice == pytest.approx(attention * (once - rest_s) + products * rest_s)


def test_only_what_runs_on_this_cpu_is_timed_and_expected_by_it(monkeypatch):
    tasks = []
    monkeypatch.setattr(
        prediction, "probed", lambda wanted: tasks.extend(wanted) or dict.fromkeys(tasks, TIMES)
    )
    elsewhere = cell(machine=FOUR_H100)
    known = timed_here([cell(), cell("mode=predict", "hardware=h100_80gb"), elsewhere])
    assert len(tasks) == 1
    assert known(cell()).basis == PROBED
    assert known(cell()).seconds != modelled(cell()).seconds
    assert known(elsewhere) == modelled(elsewhere)


def test_the_command_times_this_cpu_for_legal_cells_alone(monkeypatch):
    timed = []
    monkeypatch.setattr(run_sweep, "PROBE_PAYS_S", 0.0)
    monkeypatch.setattr(run_sweep, "timed_here", lambda cells: timed.extend(cells) or modelled)
    legal, illegal = (planned_cell(cell(*words), TWO_CORES) for words in ((), ("seq_len=1001",)))
    run_sweep.estimate_of([legal, illegal])
    assert (illegal.reason is not None, timed) == (True, [legal.cell])
