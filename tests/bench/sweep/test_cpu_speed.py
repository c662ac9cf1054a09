"""A plan on a CPU without earlier sweeps rests on a timing of that CPU."""

from dataclasses import replace

import pytest

from bench.cost.band import End
from bench.cost.calibrated_speeds import speeds_of
from bench.cost.prediction import predict
from bench.environment import describe
from bench.request.hardware import hardware_of
from bench.sweep import cpu_speed, expected
from bench.sweep.cpu_speed import LENGTHS, ROWS, ProbeTask, ProbeTimes, probed, seconds_here
from bench.sweep.expected import PROBED, STAND_IN, ExpectedSteps, modelled
from tests.cells import FOUR_H100, TWO_CORES, make_cell, tiny_cell

TIMES = ProbeTimes((0.01, 0.2), (0.002, 0.01))


def cell(*words, machine=TWO_CORES):
    return make_cell("strategy=ulysses", "seq_len=8k", *words, machine=machine)


def test_a_child_process_times_attention_and_products_of_the_cells_ranks_and_threads():
    task = ProbeTask.of(cell())
    assert (task.ranks, task.threads, task.heads, task.is_sdpa) == (2, 1, 1, False)
    times = probed([task, task])[task]
    assert (len(times.attention_s), len(times.products_s)) == (len(LENGTHS), len(ROWS))
    assert 0 < times.attention_s[0] < times.attention_s[1] < 30
    assert 0 < times.products_s[0] < times.products_s[1] < 30


@pytest.mark.parametrize(("attention", "products"), [(2, 1), (1, 2)])
def test_a_step_takes_as_many_times_as_long_as_its_parts_do(attention, products):
    of, hardware = cell(), hardware_of(str(STAND_IN))
    prediction, speeds = predict(of, hardware, None), speeds_of(hardware, End.EXPECTED)
    once = seconds_here(of, prediction, speeds, TIMES)
    longer = ProbeTimes(
        tuple(attention * each for each in TIMES.attention_s),
        tuple(products * each for each in TIMES.products_s),
    )
    twice = seconds_here(of, prediction, speeds, longer)
    rest = replace(prediction, parts=replace(prediction.parts, attention_ms=0.0))
    rest_s = seconds_here(of, rest, speeds, TIMES)
    assert 0 < rest_s < once
    assert twice == pytest.approx(attention * (once - rest_s) + products * rest_s)


def test_a_stack_that_runs_torchs_own_attention_is_timed_with_it():
    assert ProbeTask.of(cell("trainer=accelerate", "strategy=local")).is_sdpa


def test_attention_alone_which_nobody_trains_is_timed_as_our_own():
    assert not ProbeTask.of(cell("workload=attention")).is_sdpa


@pytest.fixture
def tasks(monkeypatch):
    """The tasks of which a timing was asked."""
    asked = []

    def instead(wanted):
        asked.extend(wanted)
        return dict.fromkeys(asked, TIMES)

    monkeypatch.setattr(expected, "probed", instead)
    return asked


def test_what_runs_on_this_cpu_is_expected_by_its_timing(tasks):
    known = ExpectedSteps(TWO_CORES)
    known.probe([cell()])
    assert len(tasks) == 1
    assert known.of(cell()).basis == PROBED
    assert known.of(cell()).seconds != modelled(cell()).seconds


@pytest.mark.parametrize(
    "other",
    [
        cell("mode=predict", "hardware=h100_80gb"),
        cell(machine=FOUR_H100),
        cell("seq_len=1001"),
    ],
)
def test_nothing_else_is_timed(tasks, other):
    ExpectedSteps(TWO_CORES).probe([other])
    assert tasks == []


def test_where_the_timing_fails_another_cpus_calibration_has_to_do(monkeypatch):
    monkeypatch.setattr(cpu_speed.sys, "executable", "/nowhere/python")
    known = ExpectedSteps(TWO_CORES)
    known.probe([cell()])
    assert known.of(cell()) == modelled(cell())


def test_records_of_another_arithmetic_count_for_nothing(monkeypatch):
    of = tiny_cell("seq_len=1k")
    record = {
        "environment": describe({}) | {"device_name": TWO_CORES.device_name, "cores": TWO_CORES.cores},
        "status": "ok", "provenance": "measured", "config": of.flat(),
        "analytic": {"hardware_flops_causal": 10**9}, "timing": {"step_times_ms": [[1000.0]]},
    }  # fmt: skip

    def measured(products):
        record["environment"]["cpu_products"] = products
        return ExpectedSteps(TWO_CORES, [record])._as_measured(of)

    monkeypatch.setattr(expected, "estimated_products", lambda _: "float32")
    assert measured("float32") is not None
    assert measured("bfloat16") is None
