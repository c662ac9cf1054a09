import gzip
import json
from pathlib import Path

import pytest

from analysis.trace import main, split_trace

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))


def written(path, events, **metadata):
    """Write a trace of (category, name, thread, start, duration) in microseconds."""
    keys = ("cat", "name", "tid", "ts", "dur")
    rows = [{"ph": "X", **dict(zip(keys, event, strict=True))} for event in events]
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
