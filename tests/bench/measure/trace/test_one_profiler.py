"""A profiler of somebody else's is never beside ours: torch would crash."""

import cProfile
import sys

import pytest
import torch
from torch.profiler import profile, record_function, schedule

from bench.config import ConfigError
from bench.measure.engagement.rank import watch_modules
from bench.measure.trace.one_profiler import tracing


def on_cpu(**more):
    return profile(activities=[torch.profiler.ProfilerActivity.CPU], **more)


def names(profiler):
    return {event.name for event in profiler.events()}


@pytest.mark.parametrize("chosen", [{}, {"schedule": schedule(wait=0, warmup=1, active=1)}])
def test_one_that_is_on_or_warms_up_is_left_alone(chosen):
    with on_cpu(**chosen) as theirs:
        with pytest.raises(ConfigError, match="another profiler is on"), tracing(on_cpu()):
            pass
        theirs.step()
        torch.ones(3).add(1)
    assert "aten::add" in names(theirs)


def trace_beside(theirs):
    with tracing(on_cpu()), theirs:
        torch.ones(3).add(1)


def test_one_that_is_started_meanwhile_gets_the_room():
    theirs = on_cpu()
    with pytest.raises(ConfigError, match="a profiler was started in a step that was traced"):
        trace_beside(theirs)
    assert "aten::add" in names(theirs)
    with tracing(ours := on_cpu()):
        torch.ones(3).mul(1)
    assert "aten::mul" in names(ours)


def test_an_annotation_that_outlasts_the_trace_ends_with_it_and_is_nothing_to_a_later_profiler():
    """Its end would be written into memory of the first profiler, which is free: a crash, sooner or later."""
    open_one = record_function("outlasts the trace")
    with tracing(ours := on_cpu()):
        begun = open_one.__enter__().record
        with record_function("ends before"):
            torch.ones(3).mul(1)
    assert {"outlasts the trace", "ends before"} <= names(ours)
    with on_cpu() as theirs:
        assert open_one.record is not begun
        open_one.__exit__(None, None, None)
        with record_function("another"):
            torch.ones(3).add(1)
    assert "another" in names(theirs)
    assert "outlasts the trace" not in names(theirs)


def test_pythons_own_profiler_goes_on_after_modules_were_watched():
    with cProfile.Profile() as profiler:
        with watch_modules("tests") as seen:
            on_cpu()
        after = sys.getprofile()
    assert (after, seen) == (profiler, set())
