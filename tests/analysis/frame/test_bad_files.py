"""Files that are no records: one line that names file and line, exit code 2, and nothing is written."""

import json
import os

import pytest

from analysis.frame.archive import read_archive
from analysis.report import main
from tests.analysis.records import make_failure, make_record, make_timing, of_attention, write_sweep

GOOD = json.dumps(make_record())


def timed(step_times_ms, tokens_per_step=8192):
    return json.dumps(make_record(timing=make_timing(step_times_ms, tokens_per_step)))


def section(**sections):
    return json.dumps(make_record() | sections)


def timing_with(**values):
    return section(timing=make_timing([[100.0] * 8] * 2) | values)


def trace_with(**values):
    return section(trace={"step_ms": [9.0], "total_ms": [1.0], "exposed_ms": [1.0]} | values)


WHOLE_FILES = {
    "empty": (b"", "no records yet"),
    "newlines": (b"\n\n", "records.jsonl:1: an empty line; delete it"),
    "UTF-16": ((GOOD + "\n").encode("utf-16"), "records.jsonl:1: not a record"),
    "zeros": (bytes(100) + b"\n", "records.jsonl:1: not a record"),
}
SECOND_LINES = {
    "nothing": ("", "an empty line; delete it"),
    "spaces": ("  ", "an empty line; delete it"),
    "half a record": (GOOD[:50], "not a record"),
    "a list": ("[]", "not a record: a line has to be an object"),
    "brackets without end": ("[" * 100_000, "not a record"),
    "an old schema": (
        section(schema_version=1),
        "schema_version 1, this version reads 2 or 3; run the sweep again",
    ),
    "a schema that is a list": (section(schema_version=[3]), "schema_version [3]"),
    "a schema to come": (section(schema_version=99), "schema_version 99"),
    "no schema": ('{"a": 1}', "schema_version null"),
    "NaN": (GOOD.replace('"wall_s": 3.0', '"wall_s": NaN'), "JSON is malformed: invalid character (byte "),
    "infinity": (
        GOOD.replace('"wall_s": 3.0', '"wall_s": -Infinity'),
        "JSON is malformed: invalid character (byte ",
    ),
    "a number beyond all": (GOOD.replace('"wall_s": 3.0', '"wall_s": 1e999'), "Number out of range"),
    "an integer beyond all": (GOOD.replace('"repeat": 0', f'"repeat": {"9" * 5000}'), "not a record"),
    "a negative time": (timed([[-100.0] * 8] * 2), "Expected `float` > 0.0 at `timing.step_times_ms[0][0]`"),
    "no time": (timed([[0.0] * 8] * 2), "Expected `float` > 0.0 at `timing.step_times_ms[0][0]`"),
    "a time in words": (
        timing_with(step_times_ms=[["a"], ["b"]]),
        "Expected `float`, got `str` at `timing.step_times_ms[0][0]`",
    ),
    "a truth as time": (
        timing_with(step_times_ms=[[True], [True]]),
        "Expected `float`, got `bool` at `timing.step_times_ms[0][0]`",
    ),
    "no steps": (timed([[], []]), "Expected `array` of length >= 1 at `timing.step_times_ms[0]`"),
    "no ranks": (timed([]), "Expected `array` of length >= 1 at `timing.step_times_ms`"),
    "ranks of unequal steps": (
        timed([[1.0], [1.0, 2.0]]),
        "Expected equally many step_times_ms for each rank at `timing`",
    ),
    "null steps": (timing_with(step_times_ms=None), "Expected `array`, got `null` at `timing.step_times_ms`"),
    "a negative window": (
        timing_with(window_ms=[-1.0, 1.0]),
        "Expected `float` > 0.0 at `timing.window_ms[0]`",
    ),
    "zero tokens": (timed([[100.0] * 8] * 2, 0), "Expected `int` >= 1 at `timing.tokens_per_step`"),
    "a timing without times": (
        section(timing={"warmup": "full"}),
        "missing required field `step_times_ms` at `timing`",
    ),
    "a timing that is a list": (section(timing=[1]), "Expected `object | null`, got `array` at `timing`"),
    "a length of zero": (
        GOOD.replace('"seq_len": 8192', '"seq_len": 0'),
        "Expected `int` >= 1 at `config.seq_len`",
    ),
    "a length in words": (
        GOOD.replace('"seq_len": 8192', '"seq_len": "8k"'),
        "Expected `int`, got `str` at `config.seq_len`",
    ),
    "no strategy": (
        GOOD.replace('"strategy": "ulysses"', '"strategy": null'),
        "Expected `str`, got `null` at `config.strategy`",
    ),
    "ranks in words": (
        GOOD.replace('"sp_degree": 2', '"sp_degree": "2"'),
        "Expected `int`, got `str` at `config.sp_degree`",
    ),
    "a configuration in words": (
        section(config="seq_len strategy"),
        "Expected `object`, got `str` at `config`",
    ),
    "an unknown status": (section(status="fine"), "matching regex '^(ok|unsupported|"),
    "no status": (section(status=None), "Expected `str`, got `null` at `status`"),
    "an unknown provenance": (section(provenance="guessed"), "matching regex '^(measured|replayed|"),
    "a name that is a list": (section(cell_id=[1]), "Expected `str`, got `array` at `cell_id`"),
    "a repeat in words": (section(repeat="a"), "Expected `int`, got `str` at `repeat`"),
    "a traced step of no time": (trace_with(step_ms=[0.0]), "Expected `float` > 0.0 at `trace.step_ms[0]`"),
    "a trace of no ranks": (trace_with(step_ms=[]), "without a failure needs times of every rank at `trace`"),
    "a trace of unequal ranks": (trace_with(idle_ms=[1.0, 1.0]), "values of equally many ranks at `trace`"),
    "parts of unequal ranks": (
        trace_with(compute_ms={part: [1.0, 1.0] for part in ("attention", "packing", "optimizer", "other")}),
        "values of equally many ranks at `trace`",
    ),
    "an exchange of no ranks": (
        trace_with(purpose_total_ms={"attention": []}),
        "Expected `array` of length >= 1 at `trace.purpose_total_ms[...]`",
    ),
    "calls of one device that do not match": (
        json.dumps(of_attention(make_record(), single_forward_ms=[4.0, 4.0])),
        "equally many single_forward_ms and single_backward_ms at `attention`",
    ),
    "an error without a tensor": (
        json.dumps(of_attention(make_record(), error_ulps={"out": 1.0})),
        "missing required field `dq` at `attention.error_ulps`",
    ),
    "cores in words": (
        section(environment={"cores": "4"}),
        "Expected `int | null`, got `str` at `environment.cores`",
    ),
    "a size that is no list": (
        section(environment={"gpu_memory_bytes": 5}),
        "Expected `array | null`, got `int` at `environment.gpu_memory_bytes`",
    ),
    "a negative share": (trace_with(exposed_ms=[-1.0]), "Expected `float` >= 0.0 at `trace.exposed_ms[0]`"),
    "bytes in words": (
        section(memory={"peak_allocated_bytes": "x"}),
        "Expected `array | null`, got `str` at `memory.peak_allocated_bytes`",
    ),
    "a loss in words": (
        section(losses={"loss": ["x"]}),
        "Expected `float | null`, got `str` at `losses.loss[0]`",
    ),
    "an environment that is a list": (
        section(environment=[1]),
        "Expected `object | null`, got `array` at `environment`",
    ),
}


def refused(folder, capsys, *arguments):
    """The one line that was said; nothing was written."""
    before = sorted(folder.rglob("*"))
    assert main([str(folder), *arguments]) == 2
    assert sorted(folder.rglob("*")) == before
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    return said.err


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_a_file_that_holds_no_json_lines_is_refused(tmp_path, capsys, case):
    content, said = WHOLE_FILES[case]
    (tmp_path / "records.jsonl").write_bytes(content)
    assert said in refused(tmp_path, capsys)


@pytest.mark.parametrize("case", SECOND_LINES)
def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path, capsys, case):
    line, said = SECOND_LINES[case]
    (tmp_path / "records.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    told = refused(tmp_path, capsys)
    assert "records.jsonl:2: " in told
    assert said in told


@pytest.mark.parametrize("place", ["nothing", "a folder", "a circle of links", "a link to nothing"])
def test_what_stands_in_the_place_of_the_file_is_refused(tmp_path, capsys, place):
    path = tmp_path / "records.jsonl"
    make = {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a circle of links": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("nowhere"),
    }
    make[place]()
    assert "name a sweep's folder" in refused(tmp_path, capsys)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, capsys):
    folder = write_sweep(tmp_path, [make_record()])
    assert "name a sweep's folder" in refused(folder / "records.jsonl", capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_a_file_that_may_not_be_read_is_refused(tmp_path, capsys):
    folder = write_sweep(tmp_path, [make_record()])
    (folder / "records.jsonl").chmod(0)
    assert "cannot be read (Permission denied)" in refused(tmp_path, capsys)


def test_a_report_that_cannot_be_written_says_where(tmp_path, capsys):
    folder = write_sweep(tmp_path, [make_record()])
    assert "another --output" in refused(folder, capsys, "--output", str(folder / "records.jsonl"))


USABLE = {
    "one row": [make_record()],
    "out of memory in all rows": [
        make_failure("out_of_memory", "no room", config={"seq_len": n}) for n in (1024, 2048)
    ],
    "one cell twice": [make_record(), make_record()],
    "two machines": [
        make_record(),
        make_record(config={"seq_len": 1024}, environment={"device_name": "another", "packages": {}}),
    ],
    "no analytic part": [make_record(analytic=None)],
}


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("case", USABLE)
def test_unusual_records_are_reported(tmp_path, capsys, case):
    assert main([str(write_sweep(tmp_path, USABLE[case]))]) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "report.html").stat().st_size > 0


def test_unusual_records_of_several_sweeps_are_drawn_together(tmp_path, capsys):
    folders = [write_sweep(tmp_path / str(n), records) for n, records in enumerate(USABLE.values())]
    assert main([*map(str, folders), "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_lines_may_end_as_on_windows(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(f"{GOOD}\r\n{GOOD}\r\n".encode())
    assert read_archive([tmp_path], {}).frame["status"].tolist() == ["ok"]


@pytest.mark.usefixtures("without_figures")
def test_a_torn_last_line_is_dropped_with_one_warning(tmp_path):
    (tmp_path / "records.jsonl").write_text(f"{GOOD}\n{GOOD[:50]}")
    with pytest.warns(UserWarning, match=r"records\.jsonl:2: dropped a torn last line") as warned:
        assert main([str(tmp_path)]) == 0
    assert len(warned) == 1
