"""Every fault of the matrix happens in a sweep: its record names it, the next cell is sound, nothing is left.

`pytest -m fault` runs this and all other tests of the matrix.
"""

import io
import json
import os
import re
import signal
import socket
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import psutil
import pytest
from rich.console import Console

from bench.common.environment import REPOSITORY
from bench.config import AUTO, ConfigError, ExitCode
from bench.plan.plan import plan
from bench.record.store import RECORDS, Store
from bench.request.device_sections import DEVICE_DEFAULTS
from bench.run.cell import hang
from bench.run.interrupts import SIGNALS, Interrupts
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import TINY, TWO_CORES, make_raw
from tests.support.faults import acts
from tests.support.faults.matrix import FAULTS, MATRIX
from tests.support.records import read_lines

FAULTY, SOUND = "seq_len=256", ("seq_len=512", "workload=attention")
FOLDER = "a sweep, naïve"


def row(fault):
    marks = [pytest.mark.fault(fault.number), *([pytest.mark.slow] if fault.is_slow else [])]
    return pytest.param(fault, marks=marks, id=f"F{fault.number} {fault.what}")


class Timed(Progress):
    """Progress that records when each record was on the disk."""

    def __init__(self):
        super().__init__(Console(quiet=True))
        self.stored_s = []

    def end(self, planned, record):
        super().end(planned, record)
        self.stored_s.append(time.monotonic())


@pytest.fixture
def nothing_left(launcher, tmp_path, monkeypatch):
    """Assert that the test leaves no process, port, lock or temporary file."""
    launcher.warm()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = descendants(), ports()
    yield
    assert (descendants(), ports()) == before
    _, ids = acts.first_fault(tmp_path)
    assert in_sessions(ids) == []
    assert [*tmp_path.rglob(".lock"), *scratch.iterdir()] == []


@pytest.fixture
def handled():
    """Handle signals as the command does, also if the shell started the tests with signals ignored."""
    before = {caught: signal.getsignal(caught) for caught in SIGNALS}
    for caught in SIGNALS:
        signal.signal(caught, signal.default_int_handler)
    Interrupts().install()
    yield
    for caught, handler in before.items():
        signal.signal(caught, handler)


def descendants():
    """Return the PIDs of all descendants of this process that have not ended."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def ports():
    """Return the addresses at which this process and its descendants listen."""
    processes = [psutil.Process(), *map(psutil.Process, descendants())]
    return {
        connection.laddr
        for process in processes
        for connection in process.net_connections("inet")
        if not connection.raddr
    }


def in_sessions(ids):
    """Return the processes in the sessions of ranks with these ids; a rank leads its own session."""
    alive = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) in ids and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def requests(fault):
    """Return the requests of a cell with the fault and of a sound one."""
    return [
        make_raw(*TINY, "engine=ddp", FAULTY, *fault.words),
        make_raw(*TINY, "engine=ddp", *SOUND),
    ]


def sweep(launcher, folder, fault, *, resumes=False):
    """Run a sweep of a faulty cell and a sound one; return its exit code and the times of its records."""
    raws = [raw | {"sweep_dir": str(folder), "resume": resumes} for raw in requests(fault)]
    progress = Timed()
    entry = fault.entry if fault.phase == "parity" else partial(acts.without_parity, fault.entry)
    with fault.around():
        code = run_plan(
            plan(raws, TWO_CORES, single=False),
            launcher,
            progress,
            write_report=lambda _: True,
            entry=lambda planned: entry if planned.cell.seq_len == 256 and not resumes else None,
            interrupts=Interrupts.current(),
        )
    return code, progress.stored_s or [time.monotonic()]


def strictly_read(folder):
    """Return the records, after a check that every line is complete and strict JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = read_lines(folder / RECORDS)
    lines = (folder / RECORDS).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == records
    return records


@pytest.mark.parametrize("fault", [*map(row, FAULTS)])
@pytest.mark.usefixtures("nothing_left", "handled")
def test_a_fault_is_a_record_and_the_sweep_goes_on(launcher, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(hang, "FIRST_STEP_S", 0.0)
    monkeypatch.setattr(hang, "JOIN_S", 2.0)
    folder = tmp_path / FOLDER
    code, stored_s = sweep(launcher, folder, fault)
    faulty, *others = strictly_read(folder)
    assert (faulty["status"], code) == (fault.status, fault.code), faulty["reason"]
    assert re.fullmatch(fault.reason or "None", str(faulty["reason"])), faulty["reason"]
    if fault.rank is not None:
        assert_blamed(fault, faulty["failure"])
    assert (faulty["timing"] is None) == (fault.status != "ok")
    assert fault.holds(faulty)
    if code == ExitCode.INTERRUPTED:
        assert others == []
        assert sweep(launcher, folder, fault, resumes=True)[0] == ExitCode.OK
        _, *others = strictly_read(folder)
        assert [record["config"]["seq_len"] for record in others] == [256, 512]
    assert {(record["status"], record["reason"]) for record in others} == {("ok", None)}
    if fault.within_s is not None:
        assert 0 < stored_s[0] - acts.first_fault(folder)[0] < fault.within_s


def assert_blamed(fault, failure):
    """Compare the failure in the record with the fault."""
    phase = " ".join(filter(None, (failure["phase"], failure["step_phase"])))
    memory = failure["out_of_memory"]
    assert (failure["rank"], phase) == (fault.rank, fault.phase)
    assert (memory and (memory["memory"], memory["requested_bytes"])) == fault.memory
    assert fault.log in failure["log_tail"]


@pytest.mark.fault(7)
@pytest.mark.usefixtures("nothing_left")
def test_sweep_stops_after_two_join_hangs_and_can_be_resumed(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "JOIN_S", 2.0)

    def run(entry, *words):
        output, request = io.StringIO(), (*TINY, "workload=attention", "measure.hang_timeout_s=2", *words)
        raws = [make_raw(*request, f"seq_len={length}") for length in (256, 512, 1024)]
        code = run_plan(
            plan([raw | {"sweep_dir": str(tmp_path / FOLDER)} for raw in raws], TWO_CORES, single=False),
            launcher,
            Progress(Console(file=output)),
            write_report=lambda folder: (folder / "report.html").write_text("of two cells") > 0,
            entry=lambda _: entry,
        )
        return code, output.getvalue(), [record["status"] for record in strictly_read(tmp_path / FOLDER)]

    code, output, statuses = run(acts.never_connect)
    assert (code, statuses) == (ExitCode.FAILED, ["timed_out"] * 2)
    assert output.count("two cells in a row could not connect, so the sweep stops") == 1
    for cause in ("NCCL_P2P_DISABLE=1", "NCCL_SOCKET_IFNAME", "too little /dev/shm"):
        assert cause in output
    assert "2 of 2 cells failed; to run them again: " in output
    assert (tmp_path / FOLDER / "report.html").exists()
    code, output, statuses = run(None, "resume=true")
    assert (code, statuses) == (ExitCode.OK, ["timed_out"] * 2 + ["ok"] * 3)
    assert "connect" not in output


@pytest.mark.fault(7)
@pytest.mark.usefixtures("nothing_left")
def test_sweep_that_stops_adds_no_repeats_to_its_plan(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "JOIN_S", 2.0)
    monkeypatch.setitem(DEVICE_DEFAULTS, "cpu", DEVICE_DEFAULTS["cpu"] | {"repeats": AUTO})
    words = (*TINY, "workload=attention", "measure.hang_timeout_s=2", "measure.repeats=auto")
    names = ("ulysses", "ring", "gather_kv", "ulysses_chunked")
    raws = [make_raw(*words, f"strategy={name}") | {"sweep_dir": str(tmp_path / FOLDER)} for name in names]
    whole = plan(raws, TWO_CORES, single=False)
    assert whole.is_open
    output = io.StringIO()
    run_plan(
        whole,
        launcher,
        Progress(Console(file=output)),
        write_report=lambda _: True,
        entry=lambda planned: acts.never_connect if planned.cell.strategy in names[2:] else None,
    )
    assert len(strictly_read(tmp_path / FOLDER)) == 4
    assert "the sweep stops" in output.getvalue()
    assert "more processes" not in output.getvalue()


@pytest.mark.fault(13)
@pytest.mark.usefixtures("nothing_left")
def test_two_sweeps_at_once_finish_while_port_29500_is_taken(launcher, tmp_path):
    nothing = replace(FAULTS[0], entry=None, words=())
    requests(nothing)  # Hydra composes one request at a time; results are cached
    with socket.create_server(("127.0.0.1", 29500)), ThreadPoolExecutor(2) as both:
        sweeps = [both.submit(sweep, launcher, tmp_path / name, nothing) for name in ("a", "b")]
        codes = [future.result()[0] for future in sweeps]
    assert codes == [ExitCode.OK, ExitCode.OK]
    statuses = [[record["status"] for record in strictly_read(tmp_path / name)] for name in ("a", "b")]
    assert statuses == [["ok", "ok"], ["ok", "ok"]]


@pytest.mark.fault(14)
@pytest.mark.usefixtures("nothing_left")
def test_second_sweep_in_a_folder_is_refused_while_one_runs(launcher, tmp_path):
    nothing = replace(FAULTS[0], entry=None, words=())
    with Store(tmp_path / FOLDER), pytest.raises(ConfigError, match="another process is writing here"):
        sweep(launcher, tmp_path / FOLDER, nothing)
    assert not (tmp_path / FOLDER / RECORDS).exists()


def test_every_fault_of_the_matrix_has_a_test():
    texts = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py")]
    marked = {int(number) for text in texts for number in re.findall(r"mark\.fault\((\d+)\b", text)}
    assert marked | {fault.number for fault in FAULTS} == {*MATRIX}
