"""Reading of Chrome traces of any size and layout, chunk by chunk."""

import gzip
import json
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from bench.measure.trace import reader
from bench.measure.trace.cpu_timeline import cpu_timeline
from bench.measure.trace.reader import KEPT_TRACE_NAME, TraceError, read_events, read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import StepRegions
from tests.support.cells import run_cell, tiny_cell
from tests.support.traces import call, event

MIB = 2**20


@pytest.fixture(scope="module")
def real_trace(launcher, tmp_path_factory):
    """Return the path of the unpacked trace that rank 0 of a real cell kept."""
    cell = tiny_cell("strategy=ulysses", "engine=fsdp2", "measure.trace=true", "measure.keep_traces=true")
    record, folder = run_cell(launcher, cell, tmp_path_factory.mktemp("kept"))
    assert record.status == "ok", record.reason
    unpacked = folder / "trace.json"
    unpacked.write_bytes(gzip.decompress((folder / KEPT_TRACE_NAME.format(rank=0)).read_bytes()))
    return unpacked


def repeat_trace(path, source, times):
    """Write a trace with the events of `source` repeated `times` times, in the layout of torch."""
    events = [event for event in read_events(source) if event.get("ph") == "X"]
    start = min(event["ts"] for event in events)
    period = max(event["ts"] + event["dur"] for event in events) - start + 1
    with path.open("w") as file:
        file.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        for number in range(times):
            shifted = ({**event, "ts": event["ts"] + number * period} for event in events)
            text = ",\n".join(json.dumps(event, indent=2) for event in shifted)
            file.write(text + (",\n" if number < times - 1 else "\n"))
        file.write('  ],\n  "traceName": "a.json"\n}\n')
    return path


def totals(path):
    """Return compute and communication of a whole file as one step, and the number of its events."""
    tracks = read_tracks(read_events(path))
    spans = np.concatenate([track.spans for track in tracks.values()])
    step_ns = (int(spans[:, 0].min() * 1e3) - 10**6, int(spans[:, 1].max() * 1e3) + 10**6)
    regions = StepRegions(step_ns, (), (), ())
    found = asdict(split(cpu_timeline(tracks, regions, {}, [call("barrier", "other")])))
    return {
        "compute": found["compute_ms"]["other"],
        "events": sum(map(len, tracks.values())),
        **{f"time of {kind}": ms for kind, ms in found["communication_ms"].items()},
        **{f"calls of {kind}": count for kind, count in found["calls"].items()},
    }


def test_repeated_trace_has_totals_in_proportion(real_trace, tmp_path):
    once = totals(real_trace)
    assert once["calls of all_to_all"] == 4
    many = totals(repeat_trace(tmp_path / "many.json", real_trace, 7))
    assert many == {name: pytest.approx(7 * value, rel=1e-6) for name, value in once.items()}


@pytest.mark.slow
def test_reading_a_gigabyte_takes_30_s_and_2_gib_at_most(real_trace, tmp_path):
    text = repeat_trace(tmp_path / "one.json", real_trace, 1).stat().st_size
    times = -(-(10**9) // text)
    many = repeat_trace(tmp_path / "many.json", real_trace, times)
    code = (
        "import json, resource, sys, time; from pathlib import Path;"
        "from tests.bench.measure.trace.test_trace_reader import totals;"
        "start = time.process_time(); found = totals(Path(sys.argv[1]));"
        "print(json.dumps([found, time.process_time() - start,"
        " resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))"
    )
    command = [sys.executable, "-c", code, str(many)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found, seconds, resident_kib = json.loads(done.stdout)
    print(f"{many.stat().st_size / 1e9:.2f} GB: {seconds:.1f} CPU s, {resident_kib / 2**20:.2f} GiB")
    once = totals(real_trace)
    assert found == {name: pytest.approx(times * value, rel=1e-6) for name, value in once.items()}
    assert seconds < 30
    assert resident_kib * 1024 < 2 * 1024 * MIB


@pytest.mark.parametrize("characters", [100, 1 << 22])
@pytest.mark.parametrize("indent", [None, 2])
def test_layout_and_chunk_size_do_not_change_the_events(tmp_path, monkeypatch, characters, indent):
    monkeypatch.setattr(reader, "CHUNK_CHARACTERS", characters)
    events = [event(f"aten::{name}", 1, 2, note='] , { "} \\" \n') for name in ("mm", "größer", "a\\b")]
    content = {"distributedInfo": {"ranks": [0, 1]}, "traceEvents": events, "traceName": "x"}
    (tmp_path / "trace.json").write_text(json.dumps(content, indent=indent))
    assert list(read_events(tmp_path / "trace.json")) == events


FAULTS = {
    "": "has no traceEvents",
    "{}": "has no traceEvents",
    '{"traceEvents": [{"ph": "X", "na': "cut off in line 1, character 30",
    '{"traceEvents": [{"name": "caf\\u00': "cut off in line 1",
    '{"traceEvents": [{"dur": tru': "cut off in line 1, character 26",
    '{"traceEvents": [{}': "cut off in line 1, character 20",
    '{"traceEvents":\n[{},\n{"x": "{"device": 0}"},': "from 'device\": 0}\"},' on, in line 3, character 31 ",
    '{"traceEvents":\n[' + "{},\n" * 20 + '{"GB/s": inf}]}': "from 'inf}]}' on, in line 22, character 107 ",
    '{"traceEvents": [{"path": "C:\\Users"}]}': "not JSON from '\\\\Users\"}]}' on, in line 1, character 30 ",
}


@pytest.mark.parametrize("characters", [25, 1 << 22])
@pytest.mark.parametrize("text", FAULTS)
def test_fault_of_a_trace_is_named_with_its_place(tmp_path, monkeypatch, text, characters):
    monkeypatch.setattr(reader, "CHUNK_CHARACTERS", characters)
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=rf"{re.escape(str(path))} is .*{re.escape(FAULTS[text])}"):
        list(read_events(path))


@pytest.mark.parametrize("name", [b"S\x01", b"caf\xe9"])
def test_control_characters_and_bytes_that_are_not_utf8_are_read(tmp_path, name):
    (tmp_path / "trace.json").write_bytes(b'[{"name": "' + name + b'"}]')
    assert len(list(read_events(tmp_path / "trace.json"))) == 1


def test_read_tracks_keeps_complete_events_by_category():
    """An operator of Inductor stays an operator, though its event names a CUDA stream on a B200."""
    fused = event("triton_poi_fused_add_mul_0", 0, 1, "cpu_op", stream=7, kernel_backend="triton")
    events = [fused, {"ph": "M", "name": "thread_name"}, {"ph": "i", "cat": "cpu_op", "name": "x"}]
    tracks = read_tracks(events)
    assert {name: len(track) for name, track in tracks.items() if len(track)} == {"operators": 1}
