import gzip
import json
from pathlib import Path

import pytest

from analysis.trace import exposed_waiting_ms, main, split_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))


def written(path, events, **metadata):
    """Write a trace of (category, name, thread, start, duration[, arguments]) in microseconds."""
    keys = ("cat", "name", "tid", "ts", "dur", "args")
    rows = [{"ph": "X", **dict(zip(keys, event, strict=False))} for event in events]
    path.write_text(json.dumps({**metadata, "traceEvents": rows}))
    return path


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_parts_of_a_real_trace_add_up_to_its_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event["dur"] for event in events if event.get("cat") == "user_annotation"
             and event["name"].startswith("ProfilerStep#")]  # fmt: skip
    split = split_trace(path)
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
    split = split_trace(written(tmp_path / "t.json", events, distributedInfo={"rank": 3}))
    assert split.rank == 3
    assert (split.window_ms, split.compute_ms, split.communication_ms) == (10, 4, 4)
    assert (split.exposed_ms, split.copies_ms, split.idle_ms) == (2, 1, 3)


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
    assert exposed_waiting_ms([split_trace(early), split_trace(late)]) == [6 + 1, 0]


def test_waiting_of_real_traces_is_known_if_they_name_their_host(tmp_path, capsys):
    paths = [tmp_path / path.stem for path in TRACES]
    for path, real in zip(paths, TRACES, strict=True):
        trace = json.loads(gzip.decompress(real.read_bytes())) | {"host_name": "node"}
        path.write_text(json.dumps(dict(sorted(trace.items(), key=lambda item: item[0] == "traceEvents"))))
    splits = [split_trace(path) for path in paths]
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
