"""What kineto writes at every start and stop of a profiler stays off stderr, and nothing else does."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bench.passes.trace.one_profiler import tracing
from bench.passes.trace.quiet_kineto import STDERR, without_kineto_lines


def traced(switching):
    with tracing(profile(activities=[ProfilerActivity.CPU]), switching):
        os.write(STDERR, b"theirs while it traces\n")


def test_kineto_is_silenced_and_the_loop_is_not(capfd):
    traced(nullcontext)
    if not capfd.readouterr().err.count("USDT:"):
        pytest.skip(f"torch {torch.__version__} writes no such line")
    traced(without_kineto_lines)
    assert capfd.readouterr().err == "theirs while it traces\n"


def failing_start():
    said = b"USDT:2026-11-22 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
    with without_kineto_lines():
        os.write(STDERR, b"before\n" + said + b"USDT: is no word of kineto's alone\n")
        raise ValueError("no profiler")


def test_what_others_write_meanwhile_follows_even_after_an_error(capfd):
    with pytest.raises(ValueError, match="no profiler"):
        failing_start()
    assert capfd.readouterr().err == "before\nUSDT: is no word of kineto's alone\n"
