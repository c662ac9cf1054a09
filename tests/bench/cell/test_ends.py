"""The cause is blamed, not the ranks it dragged along."""

import pytest

from bench.cell.ends import classify
from bench.cell.outcome import shortage
from bench.node.end import RankEnd
from bench.ranks.place import Place
from bench.record import OutOfMemory

PEER_GONE = {
    "phase": "timing",
    "kind": "RuntimeError",
    "message": "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
}


def failed(rank, message, kind="RuntimeError", exit_code=1):
    return RankEnd(rank, exit_code, None, {"phase": "timing", "kind": kind, "message": message}, "")


def victim(rank):
    return RankEnd(rank, 1, None, PEER_GONE, "")


@pytest.mark.parametrize(
    ("culprit", "status"),
    [
        (failed(1, "CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError"), "out_of_memory"),
        (failed(1, "TorchScript ... DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (failed(1, "", "MemoryError"), "out_of_memory"),
        (failed(1, "ran out of memory of better days"), "error"),
        (failed(1, "CUDA error: out of memory\nCUDA kernel errors might be"), "out_of_memory"),
        (
            failed(1, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "out_of_memory",
        ),
        (failed(1, "ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"), "out_of_memory"),
        (failed(1, "Failed to CUDA calloc async 608 bytes"), "out_of_memory"),
        (failed(1, "[Errno 12] Cannot allocate memory", "OSError"), "out_of_memory"),
        (failed(1, "std::bad_alloc"), "out_of_memory"),
        (failed(1, "env.PYTORCH_ALLOC_CONF=a:b: torch refuses it", "RefusedError"), "unsupported"),
        (failed(1, "CUDA error: an illegal memory access was encountered"), "error"),
        (failed(1, "tensors must be in contiguous memory format"), "error"),
        (failed(1, "can't start new thread"), "error"),
        (failed(1, "could not create a primitive"), "error"),
        (RankEnd(1, -6, None, None, "terminate called ... what():  std::bad_alloc"), "out_of_memory"),
        (RankEnd(1, -9, None, None, ""), "killed"),
        (RankEnd(1, -11, None, None, ""), "crashed"),
        (RankEnd(1, -6, None, None, ""), "crashed"),
        (RankEnd(1, 127, None, None, "DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RankEnd(1, 0, None, None, ""), "error"),
    ],
)
def test_the_rank_that_failed_first_hand_is_named(culprit, status):
    found, failure = classify([victim(0), culprit, victim(2)])
    assert found == status
    assert failure.rank == 1


WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: NCCL"
    " error: remote process exited or there was a network error, NCCL version 2.28.9"
)


@pytest.mark.parametrize(
    ("culprit", "status"),
    [
        (failed(1, "an own mistake", "ValueError"), "error"),
        (RankEnd(1, 0, None, None, ""), "error"),
        (RankEnd(1, -11, None, None, ""), "crashed"),
        (RankEnd(1, -9, None, None, ""), "killed"),
    ],
)
def test_a_rank_that_nccls_watchdog_ended_is_not_blamed_for_the_peer_it_lost(culprit, status):
    found, failure = classify([RankEnd(0, -6, None, None, WATCHDOG), culprit])
    assert (found, failure.rank) == (status, 1)


def test_a_rank_that_the_watchdog_ended_for_a_mistake_of_its_own_has_crashed():
    own = WATCHDOG.replace("remote process exited or there was a network error", "unhandled cuda error")
    found, failure = classify([victim(0), RankEnd(1, -6, None, None, own)])
    assert (found, failure.rank) == ("crashed", 1)


def test_ranks_that_wait_for_ever_are_timed_out():
    status, failure = classify([RankEnd(0, None, None, None, ""), RankEnd(1, None, None, None, "")])
    assert status == "timed_out"
    assert "measure.timeout_s" in failure.message


def test_a_rank_killed_while_others_had_to_be_stopped_is_the_culprit():
    status, failure = classify([RankEnd(0, None, None, None, ""), RankEnd(1, -9, None, None, "")])
    assert (status, failure.rank) == ("killed", 1)


@pytest.mark.parametrize(
    "culprit",
    [
        failed(1, "can't start new thread"),
        failed(1, "could not create a primitive"),
        RankEnd(1, -6, None, None, "terminate called without an active exception"),
        RankEnd(1, 127, None, None, "cannot allocate memory for thread-local data: ABORT"),
        failed(1, "Resource temporarily unavailable"),
        RankEnd(1, -11, None, None, "", place=Place("timing", "forward")),
    ],
)
def test_under_a_limit_more_deaths_are_the_limits(culprit):
    status, failure = classify([victim(0), culprit], limited=True)
    assert (status, failure.rank) == ("out_of_memory", 1)
    assert failure.out_of_memory.memory == "host"


@pytest.mark.parametrize("place", [None, Place("start", None), Place("join", None)])
def test_a_crash_before_the_limit_counts_is_none_of_its_doing(place):
    assert classify([RankEnd(0, -11, None, None, "", place=place)], limited=True)[0] == "crashed"


def test_a_crash_without_a_limit_names_its_phase():
    status, failure = classify([RankEnd(0, -11, None, None, "", place=Place("timing", "forward"))])
    assert (status, failure.phase, failure.step_phase) == ("crashed", "timing", "forward")


def test_a_rank_that_is_silent_after_others_lost_a_peer_is_an_error_and_no_timeout():
    status, failure = classify([victim(0), RankEnd(1, None, None, None, "")])
    assert (status, failure.rank) == ("error", 1)
    assert "stopped" in failure.message


def test_a_rank_that_kept_others_waiting_is_not_excused_by_the_end_that_they_were_given_for_it():
    hangs = RankEnd(1, 1, None, PEER_GONE, "", place=Place("timing", "forward"), hang="in barrier")
    status, failure = classify([RankEnd(0, None, None, None, ""), hangs])
    assert (status, failure.rank, failure.step_phase) == ("timed_out", 1, "forward")
    assert (failure.kind, failure.message) == ("timed_out", "in barrier")


def test_ranks_without_memory_are_blamed_before_those_that_were_killed_for_waiting():
    oom = failed(1, "DefaultCPUAllocator: can't allocate memory", exit_code=None)
    assert classify([RankEnd(0, None, None, None, ""), oom])[0] == "out_of_memory"


def test_only_reports_from_all_ranks_are_ok():
    assert classify([RankEnd(0, 0, {}, None, ""), RankEnd(1, 0, {}, None, "")])[0] == "ok"
    assert classify([RankEnd(0, 0, {}, None, ""), RankEnd(1, 0, None, None, "")])[0] == "error"


@pytest.mark.parametrize(
    ("held_mib", "end"),
    [
        (29.7, "held of a limit of 30.7 MiB"),
        (21.8, "limit of 30.7 MiB once the failed operation had let go of its own"),
    ],
)
def test_the_numbers_of_a_shortage_agree_with_each_other(held_mib, end):
    sizes = {
        "requested_bytes": 2 * 2**20,
        "limit_bytes": round(30.7 * 2**20),
        "held_bytes": round(held_mib * 2**20),
    }
    said = shortage(OutOfMemory(memory="host", largest=[], **sizes), "")
    assert said.startswith("no room for 2.0 MiB more of host memory, with ")
    assert said.endswith(end)
