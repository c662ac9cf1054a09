"""Bad files give one line with file and line number, exit code 2, and no output."""

import json
import os

import pytest

from analysis.read.archive import read_archive
from analysis.report import main
from tests.support.records import make_record, make_timing, with_attention_calls, write_sweep

GOOD = json.dumps(make_record())


def section(**sections):
    return json.dumps(make_record() | sections)


def timed(step_times_ms):
    return section(timing=make_timing(step_times_ms))


def trace_with(**values):
    return section(trace={"step_ms": [9.0], "total_ms": [1.0], "exposed_ms": [1.0]} | values)


WHOLE_FILES = {
    "empty": (b"", "no records yet"),
    "UTF-16 without a mark": ((GOOD + "\n").encode("utf-16-le"), "records.jsonl:1: not a record"),
    "zeros": (bytes(100) + b"\n", "records.jsonl:1: not a record"),
}
SECOND_LINES = {
    "nothing": ("", "an empty line; delete it"),
    "brackets without end": ("[" * 100_000, "not a record"),
    "an old schema": (
        section(schema_version=3),
        "schema_version 3, this version reads 5; run the sweep again",
    ),
    "a negative time": (timed([[-100.0] * 8] * 2), "Expected `float` > 0.0 at `timing.step_times_ms[0][0]`"),
    "ranks of unequal steps": (
        timed([[1.0], [1.0, 2.0]]),
        "Expected equally many step_times_ms for each rank at `timing`",
    ),
    "a length in words": (
        GOOD.replace('"seq_len": 8192', '"seq_len": "8k"'),
        "Expected `int`, got `str` at `config.seq_len`",
    ),
    "an unknown status": (section(status="fine"), "Invalid enum value 'fine' at `status`"),
    "an unknown provenance": (section(provenance="guessed"), "Invalid enum value 'guessed' at `provenance`"),
    "a negative share": (trace_with(exposed_ms=[-1.0]), "Expected `float` >= 0.0 at `trace.exposed_ms[0]`"),
    "resident memory of unequal ranks": (
        section(
            memory={"peak_allocated_bytes": None, "peak_resident_bytes": [1, 1], "base_resident_bytes": [1]}
        ),
        "values of equally many ranks at `memory`",
    ),
    "a trace of no ranks": (
        trace_with(step_ms=[]),
        "needs step_ms, total_ms and exposed_ms of every rank at `trace`",
    ),
    "a trace of unequal ranks": (trace_with(idle_ms=[1.0, 1.0]), "values of equally many ranks at `trace`"),
    "parts of unequal ranks": (
        trace_with(compute_ms={part: [1.0, 1.0] for part in ("attention", "packing", "optimizer", "other")}),
        "values of equally many ranks at `trace`",
    ),
    "calls of one device that do not match": (
        json.dumps(with_attention_calls(make_record(), one_device_forward_ms=[4.0, 4.0])),
        "equally many one_device_forward_ms and one_device_backward_ms at `attention`",
    ),
    "cores in words": (
        section(environment={"cores": "4"}),
        "Expected `int | null`, got `str` at `environment.cores`",
    ),
}


def refusal(folder, capsys, *arguments):
    """Return the one line of the refusal; nothing was written."""
    before = sorted(folder.rglob("*"))
    assert main([str(folder), *arguments]) == 2
    assert sorted(folder.rglob("*")) == before
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    return output.err


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_file_without_json_lines_is_refused(tmp_path, capsys, case):
    content, said = WHOLE_FILES[case]
    (tmp_path / "records.jsonl").write_bytes(content)
    assert said in refusal(tmp_path, capsys)


@pytest.mark.parametrize("case", SECOND_LINES)
def test_line_that_is_no_record_is_named_by_number(tmp_path, capsys, case):
    line, said = SECOND_LINES[case]
    (tmp_path / "records.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    line = refusal(tmp_path, capsys)
    assert "records.jsonl:2: " in line
    assert said in line


def test_missing_records_file_and_link_loop_are_refused(tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    assert "name a sweep's folder" in refusal(tmp_path, capsys)
    path.symlink_to(path.name)
    assert "name a sweep's folder" in refusal(tmp_path, capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_unreadable_file_is_refused(tmp_path, capsys):
    folder = write_sweep(tmp_path, [make_record()])
    (folder / "records.jsonl").chmod(0)
    assert "cannot be read (Permission denied)" in refusal(tmp_path, capsys)


def test_unwritable_output_is_named(tmp_path, capsys):
    folder = write_sweep(tmp_path, [make_record()])
    assert "another --output" in refusal(folder, capsys, "--output", str(folder / "records.jsonl"))


def test_one_report_for_several_sweeps(tmp_path, capsys):
    other = make_record(environment={"device_name": "another", "packages": {}}, analytic=None)
    folders = [write_sweep(tmp_path / str(n), [record]) for n, record in enumerate((make_record(), other))]
    assert main([*map(str, folders), "--output", str(tmp_path / "all")]) == 0
    assert capsys.readouterr().err == ""
    summary = (tmp_path / "all" / "summary.md").read_text()
    assert "another" in summary
    assert not (folders[0] / "report.html").exists()


@pytest.mark.usefixtures("without_figures")
def test_windows_line_ends_and_a_torn_last_line_are_accepted(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(f"{GOOD}\r\n{GOOD}\r\n".encode())
    assert read_archive([tmp_path], {}).frame["status"].tolist() == ["ok"]
    (tmp_path / "records.jsonl").write_text(f"{GOOD}\n{GOOD[:50]}")
    with pytest.warns(UserWarning, match=r"records\.jsonl:2: dropped a torn last line") as warned:
        assert main([str(tmp_path)]) == 0
    assert len(warned) == 1
