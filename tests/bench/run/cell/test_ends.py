"""`classify` finds the rank that caused a failure, not the ranks that failed because of it."""

import pytest

from bench.ranks.log import RankState
from bench.run.cell.ends import classify
from bench.run.node.ranks import RankEnd, RankFailure


def failure_of(message, kind="RuntimeError"):
    return RankFailure(phase="timing", kind=kind, message=message, traceback="", failed_at_s=0.0)


PEER_GONE = failure_of("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")


def failed(rank, message, kind="RuntimeError", exit_code=1):
    return RankEnd(rank, exit_code, None, failure_of(message, kind), "")


def victim(rank):
    return RankEnd(rank, 1, None, PEER_GONE, "")


@pytest.mark.parametrize(
    ("culprit", "status"),
    [
        (failed(1, "CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemoryError"), "out_of_memory"),
        (failed(1, "TorchScript ... DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (failed(1, "", "MemoryError"), "out_of_memory"),
        (failed(1, "out of resource: shared memory, Required: 107008", "OutOfMemoryError"), "error"),
        (failed(1, "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), "error"),
        (failed(1, "ran out of memory of better days"), "error"),
        (failed(1, "CUDA error: out of memory\nCUDA kernel errors might be"), "out_of_memory"),
        (failed(1, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas"), "out_of_memory"),
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
        (RankEnd(1, 1, None, None, "out of resource: registers\nCUDA out of memory"), "out_of_memory"),
        (RankEnd(1, 0, None, None, ""), "error"),
    ],
)
def test_classify_names_the_rank_that_failed_by_itself(culprit, status):
    classified, failure = classify([victim(0), culprit, victim(2)])
    assert classified == status
    assert failure.rank == 1


WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: NCCL"
    " error: remote process exited or there was a network error, NCCL version 2.28.9"
)
OWN_ERROR = WATCHDOG.replace("remote process exited or there was a network error", "unhandled cuda error")
LOST, STOPPED = RankEnd(0, -6, None, None, WATCHDOG), RankEnd(0, None, None, None, "")
TIMING = RankState("timing", "forward")
CAUSES = [
    ("an error, reported by the watchdog", LOST, failed(1, "an own mistake", "ValueError"), "error"),
    ("an exit, reported by the watchdog", LOST, RankEnd(1, 0, None, None, ""), "error"),
    ("a crash, reported by the watchdog", LOST, RankEnd(1, -11, None, None, ""), "crashed"),
    ("a kill, reported by the watchdog", LOST, RankEnd(1, -9, None, None, ""), "killed"),
    ("ended by the watchdog for its own error", victim(0), RankEnd(1, -6, None, None, OWN_ERROR), "crashed"),
    ("killed, and others stopped", STOPPED, RankEnd(1, -9, None, None, ""), "killed"),
    (
        "out of memory, then stopped", STOPPED,
        failed(1, "DefaultCPUAllocator: can't allocate memory", exit_code=None), "out_of_memory",
    ),
    ("silent after others lost a peer", victim(0), RankEnd(1, None, None, None, ""), "error"),
    (
        "kept others waiting, and lost them", STOPPED,
        RankEnd(1, 1, None, PEER_GONE, "", state=TIMING, hang="in barrier"), "timed_out",
    ),
    ("without a report", RankEnd(0, 0, {}, None, ""), RankEnd(1, 0, None, None, ""), "error"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "culprit", "status"), [case[1:] for case in CAUSES], ids=[case[0] for case in CAUSES]
)
def test_classify_blames_no_rank_that_lost_its_peer(other, culprit, status):
    classified, failure = classify([other, culprit])
    assert (classified, failure.rank) == (status, 1)


def test_ranks_that_run_at_the_deadline_are_timed_out():
    status, failure = classify([STOPPED, RankEnd(1, None, None, None, "")])
    assert status == "timed_out"
    assert "measure.timeout_s" in failure.message


@pytest.mark.parametrize(
    "culprit",
    [
        failed(1, "can't start new thread"),
        failed(1, "could not create a primitive"),
        RankEnd(1, -6, None, None, "terminate called without an active exception"),
        RankEnd(1, 127, None, None, "cannot allocate memory for thread-local data: ABORT"),
        failed(1, "Resource temporarily unavailable"),
        RankEnd(1, -11, None, None, "", state=TIMING),
    ],
)
def test_a_memory_limit_explains_more_crashes(culprit):
    status, failure = classify([victim(0), culprit], limited=True)
    assert (status, failure.rank) == ("out_of_memory", 1)
    assert failure.out_of_memory.memory == "host"


@pytest.mark.parametrize("phase", [None, "start", "join", "strategy", "limit"])
def test_a_crash_before_the_memory_limit_is_a_crash(phase):
    state = phase and RankState(phase, None)
    assert classify([RankEnd(0, -11, None, None, "", state=state)], limited=True)[0] == "crashed"


def test_failure_without_a_report_has_the_last_state_of_the_rank():
    _, failure = classify([RankEnd(0, -11, None, None, "", state=TIMING)])
    assert (failure.phase, failure.step_phase) == ("timing", "forward")
    _, failure = classify([STOPPED, RankEnd(1, 1, None, PEER_GONE, "", state=TIMING, hang="in barrier")])
    assert (failure.step_phase, failure.kind, failure.message) == ("forward", "timed_out", "in barrier")


def test_bus_error_points_at_shared_memory_files():
    assert "because /dev/shm is full" in classify([RankEnd(0, -7, None, None, "")])[1].message


def test_reports_from_all_ranks_are_ok():
    assert classify([RankEnd(0, 0, {}, None, ""), RankEnd(1, 0, {}, None, "")])[0] == "ok"
