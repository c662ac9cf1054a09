"""Telemetry of a window; a driver that fails costs values and a reason, but no cell."""

import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pynvml
import pytest
import torch

from bench.measure.telemetry import rank
from bench.measure.telemetry.rank import (
    CLOCK_EVENTS,
    PERIOD_S,
    QUERIES,
    NvmlDevice,
    TelemetrySampler,
    is_throttled,
    open_nvml,
)
from tests.support.cuda.nvml_driver import Driver


def sample(driver, seconds=0.1):
    telemetry = TelemetrySampler(NvmlDevice(driver, "handle"), period_s=0.01)
    with telemetry.window():
        time.sleep(seconds)
    return telemetry.read()


def test_every_value_is_sampled_in_a_thread():
    driver = Driver()
    found = sample(driver)
    assert len(found.sample_ms[0]) == len(found.power_w[0]) == len(found.sm_clock_mhz[0]) >= 3
    first = [samples[0][0] for samples in (found.power_w, found.utilisation, found.device_used_bytes)]
    assert first == [350.0, 0.97, 2**30]
    assert (found.clock_events, found.throttled, found.reason) == ([[]], False, None)
    assert found.sample_ms[0] == sorted(found.sample_ms[0])
    samplers = driver.threads - {threading.main_thread()}
    assert samplers
    assert not any(thread.is_alive() for thread in samplers)


def test_queries_call_functions_that_pynvml_has():
    device = NvmlDevice(create_autospec(pynvml), "handle")
    for query in QUERIES.values():
        query(device.nvml, device.handle)
    device.nvml.nvmlDeviceGetMaxClockInfo.return_value = 1_980
    device.nvml.nvmlDeviceGetComputeRunningProcesses.return_value = [SimpleNamespace(pid=os.getpid())]
    assert (device.reference_clock_mhz(), device.other_processes()) == (1_980, 0)


def test_device_lost_in_a_window_leaves_nulls_and_a_reason():
    found = sample(Driver(dies_after=2))
    assert found.power_w is found.sm_clock_mhz is found.utilisation is found.device_used_bytes is None
    assert "lost after 2 samples: GPU is lost" in found.reason
    assert found.throttled is None


@pytest.mark.parametrize(("lacking", "value"), [("power", "power_w"), ("events", "clock_events")])
def test_unsupported_value_is_the_only_null(lacking, value):
    found = sample(Driver(without=(lacking,)))
    assert [name for name in QUERIES if getattr(found, name) is None] == [value]
    assert "not reported: Not Supported" in found.reason


@pytest.mark.parametrize("lacking", ["nvml", "reference"])
def test_missing_driver_is_a_reason(lacking, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    driver = Driver(without=(lacking,))
    found = TelemetrySampler(open_nvml(torch.device("cuda", 0), driver)).read()
    error = "NVML Shared Library Not Found" if lacking == "nvml" else "Not Found"
    assert error in found.reason
    assert (found.power_w, found.throttled, found.sample_ms) == (None, None, [[]])


OWN = os.getpid()


@pytest.mark.parametrize(
    ("pids", "other_ranks", "strangers"),
    [((OWN, 1), 0, 1), ((OWN, 1, 2, 3), 2, 1), ((OWN, 1, 2, 3), 3, 0), ((2**22 + 1,), 0, None)],
)
def test_other_processes_exclude_the_ranks_of_the_cell(monkeypatch, pids, other_ranks, strangers):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    driver = Driver(pids=pids)
    driver.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    device = open_nvml(torch.device("cuda", 0), driver, other_ranks=other_ranks)
    assert (device.handle, device.other_processes()) == ("GPU-1234", strangers)


IDLE, CAP, HEAT, BRAKE = (
    CLOCK_EVENTS[name] for name in ("idle", "power_cap", "hardware_thermal", "power_brake")
)


@pytest.mark.parametrize(
    ("clocks", "events", "expected"),
    [
        ([1900.0] * 3, [0, 0, 0], False),
        ([1900.0] * 3, [CAP, IDLE, CAP | IDLE], False),
        ([1900.0] * 3, [0, HEAT, 0], True),
        ([1900.0] * 3, [BRAKE, 0, 0], True),
        ([1400.0] * 3, [0, 0, 0], True),
        ([1400.0] * 3, [CAP, CAP, CAP], False),
        ([1400.0] * 3, [CAP, 0, 0], True),
        ([300.0, 1900.0, 1900.0], [IDLE, 0, 0], False),
        ([1400.0] * 3, None, True),
        (None, None, None),
        (None, [CAP], False),
    ],
)
def test_is_throttled_by_heat_power_brake_or_low_clock(clocks, events, expected):
    assert is_throttled(clocks, events, 1980.0) is expected


def test_long_window_has_a_bounded_number_of_samples(monkeypatch):
    monkeypatch.setattr("bench.measure.telemetry.rank.MAX_SAMPLES", 8)
    found = sample(Driver(), seconds=0.4)
    assert len(found.sample_ms[0]) == len(found.power_w[0]) <= 9
    assert found.sample_ms[0][-1] > 100


@pytest.mark.parametrize("ranks", [1, 8])
def test_sampling_period_grows_with_the_ranks_of_a_node(monkeypatch, ranks):
    periods = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(rank, "TelemetrySampler", lambda _, period_s: periods.append(period_s) or Mock())
    measurement = SimpleNamespace(subject=SimpleNamespace(device=torch.device("cpu"), other_ranks_on_gpu=0))
    rank.TelemetryPass(measurement).around_window()
    assert periods == [PERIOD_S * ranks]
