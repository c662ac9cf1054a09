"""Two sweeps do not measure on the same devices at once, and no lease outlives its holder."""

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
from bench.config import ConfigError, WhenTaken
from bench.run.node.lease import MACHINE, VARIABLE, gpus_of, lease
from tests.support.cells import FOUR_H100, make_cell
from tests.support.command import typed_here

HOLDS = """
import subprocess, sys, time
from pathlib import Path
from bench.config import WhenTaken
from bench.run.node.lease import lease
with lease((), WhenTaken.REFUSE, print, folder=Path("their sweep")):
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
    print("held", child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def leases(tmp_path, monkeypatch):
    """A machine of this test's own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "leases"))
    return tmp_path / "leases"


def refused(*gpus):
    """What is said where these devices are held by another; None where they are free."""
    try:
        with lease(gpus, WhenTaken.REFUSE, print):
            return None
    except ConfigError as error:
        return str(error)


@pytest.fixture
def held():
    """Another process that holds the machine."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as process:
        said, child = process.stdout.readline().split()
        assert said == "held"
        yield process
        process.kill()
        os.kill(int(child), signal.SIGKILL)


def test_a_lease_says_who_holds_it_and_dies_with_its_holder_but_not_with_its_children(held, leases):
    said = refused()
    assert said.startswith(f"lease=refuse: this machine is in use by -c (pid {held.pid}, folder ")
    assert said.endswith("their sweep); wait for it, or add lease=none")
    (leases / f"{MACHINE}.txt").write_text("\x1b[2Ja\nb" * 10**5)
    assert refused().isprintable()
    assert len(refused()) < 1000
    held.send_signal(signal.SIGKILL)
    held.wait()
    assert refused() is None


def test_whoever_waits_says_so_once_and_goes_on_when_it_is_free(leases):
    said, entered = [], threading.Event()

    def wait():
        with lease((), WhenTaken.WAIT, said.append):
            entered.set()

    with lease((), WhenTaken.WAIT, print, folder=Path("first")):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.8)
    assert entered.wait(10)
    waiting.join()
    (line,) = said
    assert line.startswith("waiting for this machine, in use by ")
    assert line.endswith("first); lease=none runs beside it")
    assert not (leases / f"{MACHINE}.txt").exists()


def test_neighbours_on_other_gpus_run(leases):
    with lease(("a", "b"), WhenTaken.REFUSE, print):
        assert refused("c") is None
        assert f"GPU b is in use by {shlex.join(sys.argv)[:20]}" in refused("b", "c")
        assert refused("c") is None, "what was held on the way to the refusal is free again"
        assert refused() is None
        with lease(("a",), WhenTaken.NONE, print):
            pass
    # Another user can take it: filelock takes a stranger's file only where its folder has no sticky bit.
    assert stat.S_IMODE(leases.stat().st_mode) == 0o777
    assert {stat.S_IMODE(path.stat().st_mode) for path in leases.iterdir()} == {0o666}


def test_where_no_lease_can_be_taken_a_line_says_so_and_the_sweep_runs(leases):
    leases.write_text("no folder")
    said = []
    with lease((), WhenTaken.WAIT, said.append):
        pass
    assert said[0].startswith(f"no lease of this machine ({leases}")


def test_a_gpu_sweep_holds_the_gpus_that_its_ranks_are_on(monkeypatch):
    monkeypatch.setattr("bench.run.node.lease.visible_uuids", lambda: ["GPU-0", "GPU-1", "GPU-2", "GPU-3"])
    two, shared = (
        make_cell("cluster=gpu", "cluster.world_size=2", f"cluster.ranks_per_gpu={each}", machine=FOUR_H100)
        for each in (1, 2)
    )
    assert gpus_of([two, shared]) == ["GPU-0", "GPU-1"]
    assert gpus_of([shared]) == ["GPU-0"]
    assert gpus_of([two, make_cell("cluster=cpu")]) == ()
    replayed = make_cell("mode=replay", "cluster.world_size=4", "replay.rank=3", machine=FOUR_H100)
    assert gpus_of([replayed]) == ["GPU-0"]  # the other ranks do not exist


SWEEP = ("-m", "seq_len=256", "strategy=local", "sweep_dir=out")


@pytest.mark.ranks
@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_while_a_sweep_waits_is_an_interruption_that_leaves_nothing(tmp_path, held):
    path = tmp_path / "said"

    def interrupt():
        deadline_s = time.monotonic() + 30
        while "waiting" not in path.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    with path.open("w", buffering=1) as out, ThreadPoolExecutor(1) as person:
        person.submit(interrupt)
        done = typed_here(tmp_path, *SWEEP, out=out)
    assert f"(pid {held.pid}, " in path.read_text()
    assert (done.returncode, done.stderr) == (
        130,
        "interrupted before any cell ran; run the same command again\n",
    )
    refusal = typed_here(tmp_path, *SWEEP, "lease=refuse")
    assert (refusal.returncode, refusal.stderr.count("\n")) == (2, 1)
    assert refusal.stderr.startswith("lease=refuse: this machine is in use by")
    assert not (tmp_path / "out").exists()
