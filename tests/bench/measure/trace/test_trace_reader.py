"""A trace is read in pieces, whatever its size and however it is laid out."""

import gzip
import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from bench.measure.trace import reader
from bench.measure.trace.cpu_timeline import cpu_timeline
from bench.measure.trace.reader import KEPT_TRACE, TraceError, read_events, read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import Regions
from tests.support.cells import run_cell, tiny_cell
from tests.support.traces import call, event

MIB = 2**20


@pytest.fixture(scope="module")
def real_trace(launcher, tmp_path_factory):
    """The kept trace of rank 0 of a real cell, unpacked."""
    cell = tiny_cell("strategy=ulysses", "engine=fsdp2", "measure.trace=true", "measure.keep_traces=true")
    record, folder = run_cell(launcher, cell, tmp_path_factory.mktemp("kept"))
    assert record.status == "ok", record.reason
    unpacked = folder / "trace.json"
    unpacked.write_bytes(gzip.decompress((folder / KEPT_TRACE.format(rank=0)).read_bytes()))
    return unpacked


def repeated(path, source, times):
    """A trace that holds the events of another so many times, one after the other, in torch's layout."""
    events = [each for each in read_events(source) if each.get("ph") == "X"]
    start = min(each["ts"] for each in events)
    period = max(each["ts"] + each["dur"] for each in events) - start + 1
    with path.open("w") as file:
        file.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        for number in range(times):
            shifted = ({**each, "ts": each["ts"] + number * period} for each in events)
            text = ",\n".join(json.dumps(each, indent=2) for each in shifted)
            file.write(text + (",\n" if number < times - 1 else "\n"))
        file.write('  ],\n  "traceName": "a.json"\n}\n')
    return path


def totals(path):
    """Where the time of a whole file went, as one step, and how many events it holds."""
    tracks = read_tracks(read_events(path))
    spans = np.concatenate([track.spans for track in tracks.values()])
    step_ns = (int(spans[:, 0].min() * 1e3) - 10**6, int(spans[:, 1].max() * 1e3) + 10**6)
    regions = Regions(step_ns, (), (), ())
    found = asdict(split(cpu_timeline(tracks, regions, {}, [call("barrier", "other")])))
    return {
        "compute": found["compute_ms"]["other"],
        "events": sum(map(len, tracks.values())),
        **{f"time of {kind}": ms for kind, ms in found["communication_ms"].items()},
        **{f"calls of {kind}": count for kind, count in found["calls"].items()},
    }


def test_a_trace_repeated_has_its_totals_as_often(real_trace, tmp_path):
    once = totals(real_trace)
    assert once["calls of all_to_all"] == 4
    many = totals(repeated(tmp_path / "many.json", real_trace, 7))
    assert many == {name: pytest.approx(7 * value, rel=1e-6) for name, value in once.items()}


@pytest.mark.slow
def test_a_gigabyte_is_read_in_half_a_minute_and_two_gibibytes(real_trace, tmp_path):
    text = repeated(tmp_path / "one.json", real_trace, 1).stat().st_size
    times = -(-(10**9) // text)
    many = repeated(tmp_path / "many.json", real_trace, times)
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


@pytest.mark.parametrize("letters", [100, 1 << 22])
@pytest.mark.parametrize("indent", [None, 2])
def test_neither_layout_nor_the_size_of_a_piece_changes_what_is_read(tmp_path, monkeypatch, letters, indent):
    monkeypatch.setattr(reader, "CHUNK_LETTERS", letters)
    events = [event(f"aten::{name}", 1, 2, note='] , { "} \\" \n') for name in ("mm", "größer", "a\\b")]
    content = {"distributedInfo": {"ranks": [0, 1]}, "traceEvents": events, "traceName": "x"}
    (tmp_path / "trace.json").write_text(json.dumps(content, indent=indent))
    assert list(read_events(tmp_path / "trace.json")) == events


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": [{"ph": "X", "na', '{"traceEvents": [{}'])
def test_a_broken_trace_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"):
        list(read_events(tmp_path / "trace.json"))


def test_events_that_are_not_complete_are_left_out_and_a_stream_does_not_make_an_operator_a_kernel():
    """Inductor's operators name one on a B200."""
    fused = event("triton_poi_fused_add_mul_0", 0, 1, "cpu_op", stream=7, kernel_backend="triton")
    events = [fused, {"ph": "M", "name": "thread_name"}, {"ph": "i", "cat": "cpu_op", "name": "x"}]
    tracks = read_tracks(events)
    assert {name: len(track) for name, track in tracks.items() if len(track)} == {"operators": 1}
