"""Output of a sweep in a real terminal, byte by byte."""

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.common.environment import REPOSITORY
from tests.support.command import run_command_here
from tests.support.records import read_lines

RUN_SWEEP = str(REPOSITORY / "run_sweep.py")
TINY = ("strategy=local", "engine=ddp", "measure.steps=3", "measure.trace=false", "sweep_dir=out")
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d)[;m]")
DEADLINE_S = 240


def interrupted_in_terminal(folder, *words, at, width, env):
    """Type Ctrl-C once `at` is shown; return exit code, all bytes and the processes at that time."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job of a shell ignores it
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, RUN_SWEEP, *words], {**os.environ, **env})  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    output, family, deadline = b"", [], time.monotonic() + DEADLINE_S
    while (piece := _read(terminal, deadline)) != b"":
        output += piece
        if not family and at in output:
            family = psutil.Process(child).children(recursive=True)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output, family


def _read(terminal, deadline):
    """Return the next bytes; none after all processes have closed the terminal."""
    if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return b""
    try:
        return os.read(terminal, 2**16)
    except OSError:
        return b""


def drawn_lines(output):
    """Return every line that was on the screen at some time, without colours and cursor movements."""
    return [line.decode() for line in re.split(rb"[\r\n]+", CONTROL.sub(b"", output)) if line.strip()]


def bar_lines(output):
    """Return the lines drawn while the cursor was hidden, without the lines that stay."""
    drawing = b"\n".join(re.findall(rb"\x1b\[\?25l(.*?)\x1b\[\?25h", output, re.DOTALL))
    return [line for line in drawn_lines(drawing) if not line.startswith("[")]


def environment(**changes):
    """Return the environment of a terminal; remove variables that change what is written to one."""
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    for name in unset:
        os.environ.pop(name, None)
    return {"TERM": "xterm-256color", **changes}


@pytest.mark.usefixtures("launcher")
def test_ctrl_c_prints_a_command_that_resumes_the_sweep(tmp_path):
    words = ("-m", "seq_len=256,4k", *TINY)
    surroundings = {"width": 200, "env": environment(NO_COLOR="1")}
    code, output, family = interrupted_in_terminal(tmp_path, *words, **surroundings, at=b"local 4k: timing")
    assert code == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert family
    assert not alive
    assert output.count(b"\x1b[?25l") == output.count(b"\x1b[?25h") == 2  # shown again for each report
    assert not COLOUR.search(output)
    assert all(len(line) <= 200 for line in bar_lines(output))
    assert not (tmp_path / "out" / ".lock").exists()
    last = drawn_lines(output)[-1]
    assert last.startswith("to run what is missing: python ")
    program, script, *words = shlex.split(last.partition(": ")[2])
    assert (program, tmp_path / script) == ("python", Path(RUN_SWEEP))
    done = run_command_here(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    records = read_lines(tmp_path / "out" / "records.jsonl")
    assert sorted(r["config"]["seq_len"] for r in records if r["status"] == "ok") == [256, 2**12]
    assert [r["status"] for r in records].count("interrupted") == 1


def output_in_terminal(folder, *words, **changed):
    """Return exit code and all bytes of a command in this process whose output is a terminal."""
    ours, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as out, ThreadPoolExecutor(1) as reader:
        output = reader.submit(_read_all, ours)
        done = run_command_here(folder, *words, out=out, **changed)
        out.close()
        return done.returncode, output.result()


def _read_all(terminal):
    output = b""
    while (piece := _read(terminal, time.monotonic() + DEADLINE_S)) != b"":
        output += piece
    os.close(terminal)
    return output


@pytest.mark.usefixtures("launcher")
def test_terminal_shows_progress_then_table_and_report(tmp_path):
    code, output = output_in_terminal(tmp_path, "-m", "seq_len=256,1k", *TINY, **environment())
    lines = drawn_lines(output)
    assert code == 0, output
    for what in ("local 256: objective", "1/2 cells", "━"):
        assert any(what in line for line in lines), what
    for what in (r"local (256|1k): timing, step about \d/3", r"0/2 cells 0:00:\d\d about \d+ s left"):
        assert any(re.search(what, line) for line in lines), what
    assert all(len(line) <= 80 for line in bar_lines(output))
    writing, *after = drawn_lines(output[output.rindex(b"\x1b[?25h") :])
    assert writing == "writing the report"
    assert after[0].split()[:4] == ["strategy", "length", "ranks/sp", "status"]
    assert all(len(line) <= 80 for line in after)
    assert after[-1] == "report: out/report.html"
