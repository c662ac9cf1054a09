import gzip
import json
from pathlib import Path

import pytest

from analysis.trace import exposed_waiting_ms, main, split_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))


def written(path, events, **metadata):
    """Write a trace of (category, name, thread, start, duration[, arguments[, process]]) in microseconds."""
    keys = ("cat", "name", "tid", "ts", "dur", "args", "pid")
    rows = [{"ph": "X", **dict(zip(keys, event, strict=False))} for event in events]
    path.write_text(json.dumps({**metadata, "traceEvents": rows}))
    return path


def only_split(path):
    (split,) = split_trace(path).values()
    return split


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_parts_of_a_real_trace_add_up_to_its_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event["dur"] for event in events if event.get("cat") == "user_annotation"
             and event["name"].startswith("ProfilerStep#")]  # fmt: skip
    split = only_split(path)
    assert split.window_ms == pytest.approx(sum(steps) / 1e3, rel=0.01)
    parts = split.compute_ms + split.exposed_ms + split.copies_ms + split.idle_ms
    assert parts == pytest.approx(split.window_ms)
    assert split.rank == TRACES.index(path)
    assert 0 < split.exposed_ms <= split.communication_ms < split.window_ms


def test_communication_under_a_kernel_is_not_exposed(tmp_path):
    events = [
        ("kernel", "gemm", 7, 0, 4000),
        ("kernel", "ncclDevKernel_AllReduce", 9, 2000, 4000),
        ("gpu_memcpy", "Memcpy DtoD", 7, 5000, 2000),
        ("cuda_runtime", "cudaDeviceSynchronize", 1, 8000, 2000),
    ]
    split = only_split(written(tmp_path / "t.json", events, distributedInfo={"rank": 3}))
    assert split.rank == 3
    assert (split.window_ms, split.compute_ms, split.communication_ms) == (10, 4, 4)
    assert (split.exposed_ms, split.copies_ms, split.idle_ms) == (2, 1, 3)


def step(number, start, duration, category="user_annotation", process=1):
    return category, f"ProfilerStep#{number}", 1, start, duration, {}, process


def launched(name, launch, start, duration, number, process=1, gpu=(0, 0)):
    """Return the launch of a kernel at `launch` and the kernel on a GPU of (process, number)."""
    return [
        ("cuda_runtime", "cudaLaunchKernel", 1, launch, 5, {"correlation": number}, process),
        ("kernel", name, 7, start, duration, {"correlation": number, "device": gpu[1]}, gpu[0]),
    ]


LATE = [("kernel", "gemm", 7, 4_000, 60_000), ("kernel", "ncclDevKernel", 9, 64_000, 16_000)]
LATE_KERNELS = {
    "annotations on the GPU": (
        [
            *LATE,
            step(1, 4_000, 50_000, "gpu_user_annotation"),
            step(2, 54_000, 26_000, "gpu_user_annotation"),
        ],
        (80, 60, 16, 0),
    ),
    "launches": (
        [*launched("gemm", 100, 4_000, 60_000, 1), *launched("ncclDevKernel", 11_000, 64_000, 16_000, 2)],
        (80, 60, 16, 0),
    ),
    "starts": ([("kernel", "gemm", 7, 4_000, 60_000)], (64, 60, 0, 0)),
    "a kernel launched before the steps": (
        [*launched("gemm", -9, -5, 9_005, 1), *launched("ncclDevKernel", 11_000, 9_500, 70_500, 2)],
        (71, 0, 70.5, 9.005),
    ),
    "a kernel that ran before the annotation on the GPU": (
        [("kernel", "gemm", 7, 1_000, 8_000), *LATE[1:], step(2, 9_500, 70_500, "gpu_user_annotation")],
        (71, 0, 16, 8),
    ),
    "a kernel of the step after its annotation on the GPU": (
        [*launched("gemm", 100, 4_000, 60_000, 1), step(1, 30_000, 10, "gpu_user_annotation")],
        (64, 60, 0, 0),
    ),
    "a kernel launched after the steps": ([*launched("gemm", 30_000, 31_000, 9_000, 1)], (20, 0, 0, 9)),
}


@pytest.mark.parametrize("case", LATE_KERNELS)
def test_a_step_lasts_until_its_kernels_end(tmp_path, capsys, case):
    """The host's steps end at 20 ms."""
    events, (window, compute, communication, outside) = LATE_KERNELS[case]
    path = written(tmp_path / "t.json", [step(1, 0, 10_000), step(2, 10_000, 10_000), *events])
    split = only_split(path)
    assert (split.window_ms, split.compute_ms, split.communication_ms) == (window, compute, communication)
    assert split.outside_steps_ms == outside
    main([str(path)])
    assert ("ran outside the steps" in capsys.readouterr().out) == (outside > 0)


def merged(process, gpu, late, compute):
    """Return the events of one rank; correlation IDs of ranks are equal."""
    return [
        step(1, late, 10_000, process=process),
        ("cpu_op", "aten::mm", 1, late, 10, {}, process),
        *launched("gemm", late + 1, late + 100, compute, 1, process, gpu),
        *launched("ncclDevKernel", late + 2, late + 11_000, 4_000, 2, process, gpu),
    ]


HOST = [step(1, 0, 10_000), ("cpu_op", "aten::mm", 1, 0, 10, {"device": 0}, 1)]
SEVERAL = {
    "GPUs by process ID": (
        [*HOST, *(("kernel", "gemm", 7, 0, ms * 1000, {}, number) for number, ms in enumerate((2, 4)))],
        {"process 0": (10, 2), "process 1": (10, 4)},
    ),
    "GPUs by number": (
        [*HOST, *(("kernel", "gemm", 7, 0, ms * 1000, {"device": n}, 0) for n, ms in enumerate((4, 2)))],
        {"process 0, GPU 0": (10, 4), "process 0, GPU 1": (10, 2)},
    ),
    "merged ranks": (
        [*merged("[0] 77", ("[0] 0", 0), 0, 4_000), *merged("[1] 78", ("[1] 0", 0), 50_000, 2_000)],
        {"process [0] 0, GPU 0": (15, 4), "process [1] 0, GPU 0": (15, 2)},
    ),
    "merged CPU ranks": (
        [
            *HOST,
            *(("cpu_op", "aten::mm", 1, 20_000, ms, {}, 2) for ms in (10, 3_000)),
            step(1, 20_000, 5_000, process=2),
        ],
        {"process 1": (10, 0.01), "process 2": (5, 3)},
    ),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_every_gpu_or_process_of_a_file_has_a_row(tmp_path, capsys, case, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # workers of pytest-xdist have 80
    events, rows = SEVERAL[case]
    path = written(tmp_path / "t.json", events, distributedInfo={"rank": 0}, host_name="node")
    splits = split_trace(path)
    assert {name: (split.window_ms, split.compute_ms) for name, split in splits.items()} == {
        f"t.json {name}": times for name, times in rows.items()
    }
    assert main([str(path)]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in rows)
    assert "Waiting is unknown" in output


LOOKALIKES = {
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*)": "vllm::cross_device_reduce_1stage",
    "void (anonymous namespace)::multimem_all_reduce_kernel<8>()": "multimem_all_reduce_kernel",
    "void c10d::oneShotAllReduceKernel<8u>()": "c10d::oneShotAllReduceKernel",
    "nvshmemi_alltoall_kernel": "nvshmemi_alltoall_kernel",
    "void deep_ep::intranode::dispatch<8>(int4*)": "deep_ep::intranode::dispatch",
    "ncclDevKernel_AllReduce": None,
    "triton_poi_fused_all_gather_into_tensor_0": None,
    "void a::<unnamed>::multimem_all_gather<8>()": "multimem_all_gather",
    "all_reduce\ud83d": "all_reduce?",
    "void softmax<BlockAllReduce>()": None,
    "void block_all_reduce_sum<256>(float*)": None,
    "void pyg::segment_coo_reduce_scatter<1>": None,
    "deep_epilogue_gemm": None,
    "small_gather_kernel": None,
    "layernorm_shmem": None,
    "__amd_rocclr_copyBuffer.kd": None,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_communication_kernels_that_are_not_nccls_are_named(tmp_path, capsys, name):
    path = written(tmp_path / "t.json", [("kernel", name, 7, 0, 4_000)])
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    text = f"Communication does not include 4.00 ms of kernels that look like it: {LOOKALIKES[name]}."
    assert lines == ([text] if LOOKALIKES[name] else [])


NCCL = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}


def rank_trace(folder, rank, starts, *, host="node", kind="allreduce", **more):
    """Write a rank's trace with collectives at `starts` that end at 10 and 20 ms, the second under a gemm."""
    ends = (10_000, 20_000)
    events = [
        ("kernel", "ncclDevKernel", 9, start, end - start, {**NCCL, "Collective name": kind, **more})
        for start, end in zip(starts, ends, strict=False)
    ]
    names = {"host_name": host} if host else {}
    path = folder / f"{rank}.json"
    return written(
        path, [("kernel", "gemm", 7, 16_000, 9_000), *events], distributedInfo={"rank": rank}, **names
    )


def test_waiting_is_until_the_last_rank_and_only_if_exposed(tmp_path):
    early, late = rank_trace(tmp_path, 0, (2_000, 15_000)), rank_trace(tmp_path, 1, (8_000, 18_000))
    assert exposed_waiting_ms([only_split(early), only_split(late)]) == [6 + 1, 0]


def test_waiting_of_real_traces_is_known_if_they_name_their_host(tmp_path, capsys):
    paths = [tmp_path / path.stem for path in TRACES]
    for path, real in zip(paths, TRACES, strict=True):
        trace = json.loads(gzip.decompress(real.read_bytes())) | {"host_name": "node"}
        path.write_text(json.dumps(dict(sorted(trace.items(), key=lambda item: item[0] == "traceEvents"))))
    splits = [only_split(path) for path in paths]
    waiting = exposed_waiting_ms(splits)
    assert waiting[0] == 0  # rank 0 arrives last at both all-reduces
    assert waiting[1] == pytest.approx(6.317 + 5.756, abs=0.01)
    assert waiting[1] < splits[1].exposed_ms
    assert main([*map(str, paths)]) == 0
    assert "12.1" in capsys.readouterr().out


UNKNOWN = {
    "no host": ({"host": None}, (1, 2), "clocks of several hosts"),
    "another host": ({"host": "other"}, (1, 2), "clocks of several hosts"),
    "another call": ({}, (1,), "allreduce number 1 of group 0 [0, 1] is in 1 of 2 ranks' traces"),
    "another kind": ({"kind": "broadcast"}, (1, 2), "allreduce number 0 of group 0 [0, 1] is in 1 of 2"),
    "another group": ({"Process Group Ranks": "[1, 2]"}, (1, 2), "is in 1 of 2 ranks' traces"),
    "no group": ({"Group size": None}, (1, 2), "do not state the process group"),
    "the same rank": ({"rank": 0}, (1, 2), "several traces have the same rank"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_waiting_has_a_reason(tmp_path, capsys, case):
    more, starts, reason = UNKNOWN[case]
    (tmp_path / "b").mkdir()
    files = [
        rank_trace(tmp_path, 0, (1, 2), **({"Group size": None} if case == "no group" else {})),
        rank_trace(tmp_path / "b", starts=starts, **{"rank": 1, **more}),
    ]
    assert main([*map(str, files)]) == 0
    assert reason in " ".join(capsys.readouterr().out.split())


def test_waiting_says_that_it_leaves_out_sends(tmp_path, capsys):
    files = [rank_trace(tmp_path, rank, (1, 2), kind="nccl:recv 0<-1") for rank in (0, 1)]
    assert main([*map(str, files)]) == 0
    assert "without sends and receives" in capsys.readouterr().out


def test_command_prints_a_row_for_every_rank(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([*map(str, TRACES)]) == 0
    rows = capsys.readouterr().out
    assert all(path.name in rows for path in TRACES)


@pytest.mark.parametrize("text", ['{"schema": "1.1", "nodes": []}', '{"traceEvents": []}', "no", "\x1f"])
def test_a_file_that_is_no_trace_is_one_line_and_exit_2(tmp_path, capsys, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_compressed_trace_that_is_cut_says_so(tmp_path, capsys):
    path = tmp_path / "t.json.gz"
    path.write_bytes(TRACES[0].read_bytes()[:-40])
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == f"{path} is cut off\n"
