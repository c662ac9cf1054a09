"""Whatever a trace holds, its reader gives columns or its own error in one line, in little time."""

import gzip
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.passes.trace.reader import TRACKS, TraceError, read_events, read_tracks
from tests.bench.passes.traces import event, mark
from tests.fuzzing import as_line, changed_bytes, changed_json, few_and_many, fuzz

SOUND = {"schemaVersion": 1, "traceEvents": [mark(0), event("aten::mm", 1, 2)], "traceName": "a.json"}
CONTENT = as_line(SOUND)
CONTENTS = {
    "bytes": st.binary(max_size=200),
    "events of any bytes": st.binary(max_size=100).map(b'{"traceEvents": ['.__add__),
    "changed bytes": changed_bytes(CONTENT),
    "changed values": changed_json(SOUND).map(as_line),
}
GZIPPED = {
    "bytes": st.binary(max_size=200),
    "changed gzip": changed_bytes(gzip.compress(CONTENT, mtime=0)),
    "gzip of changed bytes": changed_bytes(CONTENT).map(gzip.compress),
}
NAMED = {
    **{f"{kind}, plain": ("t.json", strategy) for kind, strategy in CONTENTS.items()},
    **{f"{kind}, gzipped": ("t.json.gz", strategy) for kind, strategy in GZIPPED.items()},
}


def read(path):
    return read_tracks(read_events(path))


def outcome(path):
    """The tracks, or what the reader's own error says."""
    try:
        return read(path)
    except TraceError as error:
        return str(error)


@few_and_many()
@pytest.mark.parametrize("kind", NAMED)
def test_any_content_is_columns_or_one_line(tmp_path, kind, examples):
    name, contents = NAMED[kind]
    path = tmp_path / name

    @given(contents)
    def check(content):
        path.write_bytes(content)
        found = outcome(path)
        if isinstance(found, str):
            assert "\n" not in found
            assert found.startswith((str(path), "no Chrome trace: "))
        else:
            assert found.keys() == {*TRACKS.values()}
            assert all(len(track.spans) == len(track.name) for track in found.values())

    fuzz(examples, check)


EVENTS = CONTENT.partition(b"[")[0] + b"["
ENDLESS = {
    "spaces": (b" ", "too long for a Chrome trace"),
    "brackets": (b"[", "recursion"),
    "digits": (b"1", "Exceeds the limit"),
    "letters": (b"a" * 1000, "an event has no end"),
    "events": (json.dumps(event("aten::mm", 1, 2)).encode() + b",", "too long for a Chrome trace"),
}
MOST_S = 30


@pytest.mark.parametrize("what", ENDLESS)
def test_a_small_file_that_unpacks_to_a_long_one_is_refused_soon(tmp_path, monkeypatch, what):
    """24 MB of it, so that a test takes no longer; the lengths that are allowed are as much shorter."""
    monkeypatch.setattr("bench.passes.trace.reader.MAX_TRACE_LETTERS", 2**24)
    monkeypatch.setattr("bench.passes.trace.reader.MAX_EVENT_LETTERS", 2**22)
    monkeypatch.setattr("bench.passes.trace.reader.CHUNK_LETTERS", 2**20)
    path, (unit, said) = tmp_path / "t.json.gz", ENDLESS[what]
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(EVENTS + (b'"' if what == "letters" else b""))
        for _ in range(24):
            file.write(unit * (10**6 // len(unit)))
    begun = time.monotonic()
    with pytest.raises(TraceError, match=said):
        read(path)
    assert time.monotonic() - begun < MOST_S
