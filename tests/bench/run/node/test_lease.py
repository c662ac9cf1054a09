"""A lease keeps two sweeps from measuring on the same device, and ends with its holder."""

import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.common.environment import REPOSITORY
from bench.config import ConfigError, LeasePolicy
from bench.run.node.lease import MACHINE, VARIABLE, gpus_of, lease
from tests.support.cells import FOUR_H100, make_cell
from tests.support.command import run_command_here

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from bench.config import LeasePolicy
from bench.run.node.lease import lease
with lease((), LeasePolicy.REFUSE, print, folder=Path("their sweep")):
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
    print("leased", child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def leases(tmp_path, monkeypatch):
    """Give the test its own folder of leases."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "leases"))
    return tmp_path / "leases"


def refusal(*gpus):
    """Return the refusal to lease these devices, or None if they are free."""
    try:
        with lease(gpus, LeasePolicy.REFUSE, print):
            return None
    except ConfigError as error:
        return str(error)


@pytest.fixture
def holder():
    """Start another process that leases the machine."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        word, child = process.stdout.readline().split()
        assert word == "leased"
        yield process
        process.kill()
        os.kill(int(child), signal.SIGKILL)


def test_lease_names_its_holder_and_ends_with_that_process(holder, leases):
    """The holder's child, which still runs, does not prolong it."""
    line = refusal()
    assert line.startswith(f"lease=refuse: this machine is in use by -c (pid {holder.pid}, folder ")
    assert "their sweep); " in line
    assert line.endswith("lease=none")
    (leases / f"{MACHINE}.txt").write_text("\x1b[2Ja\nb" * 10**5)
    assert refusal().isprintable()
    assert len(refusal()) < 1000
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert refusal() is None


def test_lease_prints_one_line_and_waits_until_it_is_free(leases):
    lines, entered = [], threading.Event()

    def wait():
        with lease((), LeasePolicy.WAIT, lines.append):
            entered.set()

    with lease((), LeasePolicy.WAIT, print, folder=Path("first")):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.8)
    assert entered.wait(10)
    waiting.join()
    (line,) = lines
    assert line.startswith("waiting for this machine, which is in use by ")
    assert "first); lease=none" in line
    assert not (leases / f"{MACHINE}.txt").exists()


def test_lease_of_other_gpus_is_free(leases):
    with lease(("a", "b"), LeasePolicy.REFUSE, print):
        assert refusal("c") is None
        assert f"GPU b is in use by {shlex.join(sys.argv)[:20]}" in refusal("b", "c")
        assert refusal("c") is None, "GPU c, which was locked before the refusal, is free again"
        assert refusal() is None
        with lease(("a",), LeasePolicy.NONE, print):
            pass
    # Another user can take it: filelock takes another user's file only if its folder has no sticky bit.
    assert stat.S_IMODE(leases.stat().st_mode) == 0o777
    assert {stat.S_IMODE(path.stat().st_mode) for path in leases.iterdir()} == {0o666}


def test_lease_that_cannot_be_taken_prints_a_line_and_goes_on(leases):
    leases.write_text("no folder")
    lines = []
    with lease((), LeasePolicy.WAIT, lines.append):
        pass
    assert lines[0].startswith(f"cannot lock this machine ({leases}")


def test_gpus_of_are_the_gpus_of_the_running_ranks(monkeypatch):
    monkeypatch.setattr("bench.run.node.lease.visible_uuids", lambda: ["GPU-0", "GPU-1", "GPU-2", "GPU-3"])
    two, shared = (
        make_cell("cluster=gpu", "cluster.world_size=2", f"cluster.ranks_per_gpu={ranks}", machine=FOUR_H100)
        for ranks in (1, 2)
    )
    assert gpus_of([two, shared]) == ["GPU-0", "GPU-1"]
    assert gpus_of([shared]) == ["GPU-0"]
    assert gpus_of([two, make_cell("cluster=cpu")]) == ()
    replayed = make_cell("mode=replay", "cluster.world_size=4", "replay.rank=3", machine=FOUR_H100)
    assert gpus_of([replayed]) == ["GPU-0"]  # the other ranks do not exist


SWEEP = ("-m", "seq_len=256", "strategy=local", "sweep_dir=out")


@pytest.mark.ranks
@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_while_waiting_for_a_lease_leaves_nothing(tmp_path, holder):
    path = tmp_path / "output"

    def interrupt():
        deadline_s = time.monotonic() + 30
        while "waiting" not in path.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    with path.open("w", buffering=1) as out, ThreadPoolExecutor(1) as person:
        person.submit(interrupt)
        done = run_command_here(tmp_path, *SWEEP, out=out)
    assert f"(pid {holder.pid}, " in path.read_text()
    assert (done.returncode, done.stderr) == (
        130,
        "interrupted before any cell ran; run the same command again\n",
    )
    refusal = run_command_here(tmp_path, *SWEEP, "lease=refuse")
    assert (refusal.returncode, refusal.stderr.count("\n")) == (2, 1)
    assert refusal.stderr.startswith("lease=refuse: this machine is in use by")
    assert not (tmp_path / "out").exists()
