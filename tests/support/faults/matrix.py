"""Faults that a sweep has to survive, and the expected record of each fault of a rank."""

import importlib.metadata
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from signal import SIGKILL, SIGSEGV, SIGSTOP

import pytest
import torch.distributed as dist

from analysis.read.results import Results
from bench.common.environment import installed_version
from bench.config import ExitCode
from tests.support.faults import acts
from tests.support.faults.classes.attention import skip_the_lse_rescale
from tests.support.faults.classes.not_finite import overflow_the_loss_of_rank_1_in_step_1
from tests.support.faults.classes.tampering import run_with_fault
from tests.support.records import as_record

MATRIX = {
    1: "out of memory in one rank, the others in a collective",
    2: "out of memory, then a slow cleanup",
    3: "out of memory on every rank",
    4: "an error that looks like one of memory",
    5: "a rank is killed",
    6: "a rank crashes",
    7: "a rank hangs",
    8: "a rank ignores SIGTERM",
    9: "a rank leaves with code 0 and no result",
    10: "ranks call different collectives",
    11: "the launcher is killed",
    12: "Ctrl-C, once and twice",
    13: "a port is taken, or two sweeps run at once",
    14: "two sweeps write to one folder",
    15: "the disk is full",
    16: "the last line is torn",
    17: "a line of the records is corrupt",
    18: "a sweep is resumed",
    19: "records are of other code, torch or device",
    20: "a folder cannot be written to, or has an odd name",
    21: "GPU counters are missing or die",
    22: "the device is throttled",
    23: "the profiler fails, or its trace is no good",
    24: "a package is not installed",
    25: "attention computes wrong numbers",
    26: "the wall clock jumps",
    27: "a GPU is truly full, then the next cell",
}
"""Faults by number. Tests name them in `pytest.mark.fault(NUMBER)`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One variant of a fault of the matrix on ranks, with the expected record."""

    number: int
    what: str
    entry: Callable
    status: str
    reason: str | None
    """Pattern that matches the record's whole reason; None if it has no reason."""
    rank: int | None = 1
    """Rank that failed; None if no rank failed, and then there is no phase."""
    phase: str | None = "objective forward"
    """Phase of the rank, and phase of its step, in which it failed."""
    within_s: float | None = None
    """Largest time in seconds from the fault until the record is on disk; None if no rank records a fault."""
    words: tuple[str, ...] = ()
    memory: tuple[str, int | None] | None = None
    """Kind of memory that had no room, and the bytes that were asked for."""
    log: str = ""
    """Text near the end of the failing rank's log."""
    code: ExitCode = ExitCode.FAILED
    around: Callable = nullcontext
    """Context in which the launcher's own process runs."""
    holds: Callable = lambda record: True
    """Predicate that is true of the record."""
    is_slow: bool = False


def in_a_step(act, *words, ranks=(1,)):
    return partial(acts.in_a_step, partial(act, *words), ranks)


def from_the_start(fault):
    return partial(acts.from_the_start, partial(run_with_fault, fault))


@contextmanager
def a_wall_clock_that_goes_back():
    """Make the launcher's wall clock go back by an hour at every call."""
    calls = iter(range(10**9))

    class Backwards(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.fromtimestamp(time.time(), zone)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e9 - 3600.0 * next(calls))
        patch.setattr("bench.run.cell.run.datetime", Backwards)
        yield


@contextmanager
def without_ring_flash_attn():
    """Hide the package ring-flash-attn, as if it were not installed."""
    version = importlib.metadata.version

    def version_of(name):
        if name == "ring-flash-attn":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version_of)
        installed_version.cache_clear()
        yield
    installed_version.cache_clear()


def has_durations_of_seconds(record):
    """Return whether the record's durations are plausible although the wall clock went back."""
    assert datetime.fromisoformat(record["started_at"]) < datetime(2002, 1, 1, tzinfo=UTC)
    steps_ms = [time_ms for rank in record["timing"]["step_times_ms"] for time_ms in rank]
    return 0 < max(steps_ms) / 1e3 < record["wall_s"] < 60


def has_no_figures(reason, record):
    telemetry = record["telemetry"]
    figures = [telemetry[name] for name in ("power_w", "sm_clock_mhz", "utilisation", "throttled")]
    return figures == [None] * 4 and reason in telemetry["reason"]


def is_throttled(record):
    note = Results(as_record(record), {}).note
    return record["telemetry"]["throttled"] and "throttled while timed (hardware_thermal)" in note


def is_not_traced(reason, record):
    """Return whether the record has times but no trace, with this reason everywhere."""
    results = Results(as_record(record), {})
    assert results.median_ms > 0
    assert (results.straggler_gap_ms, results.attention_shares, results.valid_trace) == (None, None, None)
    (check,) = (check for check in record["checks"] if check["what"] == "attention kernel")
    texts = (record["trace"]["failure"], check["reason"], results.note.rpartition("shares: ")[2])
    return all(text.startswith(reason) for text in texts)


def lacks_a_loss(record):
    return record["losses"]["loss"][1] is None


IN_A_STEP = "rank 1, objective forward: "
ALLOCATOR = "could not allocate 1073741824.0 GiB of host memory"
SILENT = "no rank has reported progress for 2 s: rank 1 is "
WAITS = "while rank 0 waits in all_reduce; .* raise measure.hang_timeout_s, .*"
LOOKS_OFTEN = ("measure.hang_timeout_s=2",)
"""Words for a short time limit. FIRST_STEP_S must be 0, because these faults precede the first full-length
step."""
AT_ONCE_S, AFTER_SILENCE_S = 6.0, 12.0
SOUND = {"status": "ok", "reason": None, "rank": None, "code": ExitCode.OK}
TRACED = SOUND | {"words": ("measure.trace=true",)}
FINDING = {"status": "out_of_memory", "code": ExitCode.OK}

FAULTS = (
    Fault(
        number=1, what="out of memory", entry=in_a_step(acts.ask_for_too_much), **FINDING,
        reason=IN_A_STEP + ALLOCATOR, memory=("host", 2**60), within_s=AT_ONCE_S,
    ),
    Fault(
        number=2, what="and cleans up", entry=in_a_step(acts.ask_for_too_much_and_clean_up), **FINDING,
        reason=IN_A_STEP + ALLOCATOR, memory=("host", 2**60), within_s=AT_ONCE_S,
    ),
    Fault(
        number=3, what="on every rank", entry=in_a_step(acts.ask_for_too_much, ranks=(0, 1)), **FINDING,
        reason="rank 0, objective forward: " + ALLOCATOR, rank=0, memory=("host", 2**60), within_s=AT_ONCE_S,
    ),
    Fault(
        number=4, what="of a device", entry=in_a_step(acts.run_out_of_device_memory), **FINDING,
        reason=IN_A_STEP + "could not allocate 2.0 GiB of device memory", memory=("device", 2 * 2**30),
        within_s=AT_ONCE_S,
    ),
    Fault(
        number=4, what="only the word memory", entry=in_a_step(acts.speak_of_memory), status="error",
        reason=IN_A_STEP + "RuntimeError: tensors must be in contiguous memory format", within_s=AT_ONCE_S,
    ),
    Fault(
        number=5, what="SIGKILL", entry=in_a_step(acts.receive, SIGKILL), status="killed",
        reason=IN_A_STEP + "killed by another process; .*", within_s=AT_ONCE_S,
    ),
    Fault(
        number=6, what="SIGSEGV", entry=in_a_step(acts.receive, SIGSEGV), status="crashed",
        reason=IN_A_STEP + r"ended by SIG\w+; .*", log="in receive", within_s=AT_ONCE_S,
    ),
    Fault(
        number=7, what="asleep", entry=in_a_step(acts.sleep_for_an_hour), words=LOOKS_OFTEN,
        status="timed_out", reason=IN_A_STEP + SILENT + r"in sleep_for_an_hour \(acts.py:\d+\), " + WAITS,
        log="in sleep_for_an_hour", within_s=AFTER_SILENCE_S,
    ),
    Fault(
        number=7, what="past the deadline", entry=acts.sleep_in_rank_1, words=("measure.timeout_s=3",),
        status="timed_out", phase="start", log="in sleep_in_rank_1",
        reason=r"rank 1, start: the cell did not end within measure.timeout_s=3: rank 1 is in sleep_in_rank_1"
        r" \(acts.py:\d+\), while rank 0 waits in init_process_group; .* raise measure.timeout_s",
    ),
    Fault(
        number=7, what="never connects", entry=acts.never_connect, words=LOOKS_OFTEN, status="timed_out",
        phase="join", log="in sleep_for_an_hour",
        reason="rank 1, join: " + SILENT + r"in sleep_for_an_hour \(acts.py:\d+\), " + WAITS,
    ),
    Fault(
        number=7, what="SIGSTOP", entry=in_a_step(acts.receive, SIGSTOP), words=LOOKS_OFTEN,
        status="timed_out", reason=IN_A_STEP + SILENT + "stopped by a signal such as SIGSTOP, " + WAITS,
        within_s=AFTER_SILENCE_S,
    ),
    Fault(
        number=8, what="and so does its child", entry=in_a_step(acts.ignore_sigterm_with_a_child),
        words=LOOKS_OFTEN, status="timed_out", reason=IN_A_STEP + SILENT + "in sleep_for_an_hour .*" + WAITS,
        within_s=AFTER_SILENCE_S,
    ),
    Fault(
        number=9, what="exit code 0", entry=in_a_step(os._exit, 0), status="error",
        reason=IN_A_STEP + "error: exited with code 0 and no result; .*", within_s=AT_ONCE_S,
    ),
    Fault(
        number=10, what="another size", entry=in_a_step(acts.reduce, 3), status="crashed",
        reason=IN_A_STEP + r"ended by SIG\w+; .*", within_s=AT_ONCE_S,
    ),
    Fault(
        number=10, what="another order", entry=in_a_step(dist.barrier), words=LOOKS_OFTEN,
        status="timed_out", reason=IN_A_STEP + SILENT + "in barrier, " + WAITS, within_s=AFTER_SILENCE_S,
        is_slow=True,
    ),
    Fault(
        number=12, what="twice", entry=in_a_step(acts.interrupt_the_launcher), status="interrupted",
        reason=r"stopped by Ctrl-C after \d+ s", rank=None, within_s=AT_ONCE_S, code=ExitCode.INTERRUPTED,
    ),
    Fault(
        number=21, what="no NVML", entry=partial(acts.with_nvml, {"without": ("nvml",)}), **SOUND,
        holds=partial(has_no_figures, "no NVML figures: NVML Shared Library Not Found"), is_slow=True,
    ),
    Fault(
        number=21, what="lost after some samples", entry=partial(acts.with_nvml, {"dies_after": 1}),
        words=("measure.steps=20",), **SOUND,
        holds=partial(has_no_figures, "sm_clock_mhz lost after 1 samples: GPU is lost"),
    ),
    Fault(
        number=22, what="too hot", entry=partial(acts.with_nvml, {"events": 0x40}), **SOUND,
        holds=is_throttled,
    ),
    Fault(
        number=23, what="does not start", entry=partial(acts.with_profiler, acts.DeadProfiler),
        **TRACED, holds=partial(is_not_traced, "rank 1: the profiler did not start: kineto is not there"),
    ),
    Fault(
        number=23, what="a torn trace", entry=partial(acts.with_profiler, acts.TornTrace),
        **TRACED, holds=partial(is_not_traced, "rank 1: the trace cannot be read: "), is_slow=True,
    ),
    Fault(
        number=24, what="ring-flash-attn", entry=None, words=("strategy=ring_flash_attn",), rank=None,
        status="unsupported", around=without_ring_flash_attn, code=ExitCode.OK,
        reason="strategy=ring_flash_attn needs the package ring-flash-attn; install it with: pip install .*",
    ),
    Fault(
        number=26, what="back by an hour at every look", entry=acts.set_the_wall_clock_back, **SOUND,
        around=a_wall_clock_that_goes_back, holds=has_durations_of_seconds,
    ),
    Fault(
        number=25, what="partial outputs that are not rescaled",
        entry=from_the_start(skip_the_lse_rescale), words=("strategy=ring",), status="wrong_result",
        reason="rank 0, parity: attention parity: out is off .*", rank=0, phase="parity", within_s=AT_ONCE_S,
    ),
    Fault(
        number=25, what="numbers that are not finite", status="wrong_result", rank=None, holds=lacks_a_loss,
        entry=partial(run_with_fault, overflow_the_loss_of_rank_1_in_step_1),
        reason="losses: the loss of step 1 on rank 1 is inf",
    ),
)  # fmt: skip
