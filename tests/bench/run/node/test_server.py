"""The fork server: what its processes import, interruptions while they start, and broken packages."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from types import ModuleType

import psutil
import pytest

from bench.common.environment import REPOSITORY
from bench.run.node.server import ForkServer
from tests.support.cells import tiny_cell


def exit_by_whether_gc_is_enabled():
    sys.exit(0 if gc.isenabled() else 1)


def test_forked_process_skips_the_main_module_and_enables_gc(tmp_path, launcher, monkeypatch):
    """The server imports packages with the garbage collection switched off."""
    path = tmp_path / "main.py"
    path.write_text("raise SystemExit('was run')")
    main = ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    process = ForkServer().create_process(exit_by_whether_gc_is_enabled)
    process.start()
    process.join()
    assert (process.exitcode, sys.modules["__main__"]) == (0, main)


@pytest.mark.usefixtures("sigint_raises")
def test_an_interruption_while_a_rank_starts_leaves_no_rank(launcher, tmp_path, monkeypatch):
    """The signal arrives when the rank runs and the launcher does not know its PID yet."""
    read_number = forkserver.read_signed

    def interrupted(descriptor):
        while not (tmp_path / "rank_0.log").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        return read_number(descriptor)

    before = {*psutil.Process().children(recursive=True)}
    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.run(tiny_cell(), tmp_path)
    assert {*psutil.Process().children(recursive=True)} <= before


RUN = """
import json, sys
from pathlib import Path
from bench.run.cell.launcher import Launcher
from bench.config import Cell

if __name__ == "__main__":
    cell = Cell.from_flat(json.loads(sys.argv[1]))
    for end in Launcher().run(cell, Path(sys.argv[2])):
        print(end.rank, end.failure.phase, end.failure.kind, end.failure.message)
"""


@pytest.mark.ranks
def test_a_broken_package_is_the_failure_of_every_rank(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libtorch.so: cannot open shared object file')")
    path = os.pathsep.join([str(REPOSITORY), str(broken.parent)])
    script = tmp_path / "run.py"
    script.write_text(RUN)
    words = [sys.executable, script, json.dumps(tiny_cell().flat()), tmp_path]
    done = subprocess.run(words, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    failure = "import OSError libtorch.so: cannot open shared object file"
    assert (done.stdout, done.stderr) == (f"0 {failure}\n1 {failure}\n", "")
