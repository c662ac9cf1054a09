"""A package's compiler is seen while it runs, and named by the operator that it builds."""

import os
import subprocess
import time
from contextlib import suppress

import pytest

from bench.cell.watch import Silent
from bench.node.compilation import LOOK_S, ONCE, CompilationWatch, compiled_by
from tests.cells import tiny_cell

BUILD = """
rule compile
  command = sleep 60
build adam.o: compile {source}
"""


def compiling(folder, source):
    """A process that waits for ninja in this folder, as torch.utils.cpp_extension does."""
    (folder / "adam.cpp").touch()
    (folder / "build.ninja").write_text(BUILD.format(source=source))
    return subprocess.Popen(["ninja", "-v"], cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.fixture
def seen(tmp_path):
    """What is said of this process while ninja runs for it, and what afterwards."""
    folder = tmp_path / "site-packages" / "deepspeed" / "ops" / "fused_adam"
    folder.mkdir(parents=True)
    ninja, deadline, watch = compiling(folder, folder / "adam.cpp"), time.monotonic() + 20, CompilationWatch()
    try:
        while (found := compiled_by(os.getpid())) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        watched = watch.found(100.0, [os.getpid()])
    finally:
        os.killpg(ninja.pid, 9)
        ninja.wait()
    return found, watched, watch.found(100.5, [os.getpid()]), watch.found(101.0, [os.getpid()])


def test_a_rank_s_compiler_is_named_with_its_operator_as_long_as_it_runs(seen):
    said = f"deepspeed compiles its operator fused_adam, {ONCE}"
    assert seen == (said, said, said, None)  # it looks once a second


def wait_for_ninja(job, log):
    """A rank that has an operator compiled."""
    log.begin("model")
    with suppress(subprocess.TimeoutExpired):
        compiling(job.folder, "adam.cpp").wait(2.5 * LOOK_S)
    return {}


class Said(Silent):
    """What a listener is told of compilers."""

    def __init__(self):
        self.all = []

    def compiles(self, what):
        self.all.append(what)


def test_a_listener_is_told_of_the_compilers_of_a_cell_s_ranks(launcher, tmp_path):
    said = Said()
    cell = tiny_cell("strategy=local", "engine=ddp")
    (end,) = launcher.run(cell, tmp_path / "operator", entry=wait_for_ninja, listener=said)
    assert end.report is not None, end.log_tail
    assert f"a package compiles its operator operator, {ONCE}" in said.all
