"""The benchmark's profiler never runs together with another profiler: torch would crash."""

import cProfile
import sys

import pytest
import torch
from torch.profiler import profile, record_function, schedule

from bench.config import ConfigError
from bench.measure.engagement.rank import watch_modules
from bench.measure.trace.exclusive_profiler import exclusive_profiling


def on_cpu(**more):
    return profile(activities=[torch.profiler.ProfilerActivity.CPU], **more)


def names(profiler):
    return {event.name for event in profiler.events()}


@pytest.mark.parametrize("chosen", [{}, {"schedule": schedule(wait=0, warmup=1, active=1)}])
def test_running_or_warming_up_profiler_is_not_disturbed(chosen):
    with on_cpu(**chosen) as theirs:
        with pytest.raises(ConfigError, match="another profiler runs"), exclusive_profiling(on_cpu()):
            pass
        theirs.step()
        torch.ones(3).add(1)
    assert "aten::add" in names(theirs)


def trace_while_starting(theirs):
    with exclusive_profiling(on_cpu()), theirs:
        torch.ones(3).add(1)


def test_profiler_started_within_a_traced_step_takes_over():
    theirs = on_cpu()
    with pytest.raises(ConfigError, match="a profiler was started in a step that was traced"):
        trace_while_starting(theirs)
    assert "aten::add" in names(theirs)
    with exclusive_profiling(ours := on_cpu()):
        torch.ones(3).mul(1)
    assert "aten::mul" in names(ours)


def test_annotation_open_at_the_end_of_a_trace_is_ended_with_it():
    """An annotation that ends later would write to freed memory of the first profiler."""
    outlasting = record_function("outlasts the trace")
    with exclusive_profiling(ours := on_cpu()):
        begun = outlasting.__enter__().record
        with record_function("ends before"):
            torch.ones(3).mul(1)
    assert {"outlasts the trace", "ends before"} <= names(ours)
    with on_cpu() as theirs:
        assert outlasting.record is not begun
        outlasting.__exit__(None, None, None)
        with record_function("another"):
            torch.ones(3).add(1)
    assert "another" in names(theirs)
    assert "outlasts the trace" not in names(theirs)


def test_python_profiler_runs_on_after_watch_modules():
    with cProfile.Profile() as profiler:
        with watch_modules("tests") as modules:
            on_cpu()
        after = sys.getprofile()
    assert (after, modules) == (profiler, set())
