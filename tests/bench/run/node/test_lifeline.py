"""Ranks and fork server end when their launcher is killed."""

import signal
import subprocess
import sys

import psutil
import pytest

from bench.common.environment import REPOSITORY

LAUNCHER = """
import multiprocessing, os, time
from multiprocessing import forkserver
from bench.run.node.lifeline import die_with_launcher

def rank():
    die_with_launcher()
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=rank)
    process.start()
    process.join()
"""


@pytest.fixture
def launched(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text(LAUNCHER)
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE) as launcher:
        rank, server = (psutil.Process(int(pid)) for pid in launcher.stdout.readline().split())
        yield launcher, rank, server
        for process in (launcher, rank, server):
            if process.pid and psutil.pid_exists(process.pid):
                process.kill()


@pytest.mark.fault(11)
@pytest.mark.ranks
def test_no_rank_and_no_server_outlives_a_killed_launcher(launched):
    launcher, rank, server = launched
    launcher.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([rank, server], timeout=10)[1] == []
