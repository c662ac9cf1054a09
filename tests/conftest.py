"""Share one fork server among all tests, and schedule the tests that start ranks."""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from bench.extras.predict.time_modes import register
from bench.run.cell.launcher import Launcher
from bench.run.node import server
from bench.run.node.lease import VARIABLE
from bench.run.node.local import LocalNode

SERVER = "server"
"""xdist group of the tests that share a fork server; another server would import everything again."""
LAST = (
    "test_training_equivalence.py", "test_traced_ranks.py", "test_strategies.py",
    "test_attention_workload.py", "test_full_length.py", "test_allocations.py",
    "test_choices_together.py", "test_embedding.py", "test_weights.py", "test_call_memory.py",
)  # fmt: skip
"""Test files that start ranks and run last, on the worker that is free first, with another fork server. The
longest come first, so that both workers end at the same time."""
register()  # adds the modes that the command has
gc.set_threshold(
    200_000, 20, 100
)  # tests keep many objects, and collecting garbage took a seventh of their time
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: each worker has one core
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait must not use the other worker's core


@pytest.fixture(scope="session", autouse=True)
def _own_leases(tmp_path_factory):
    """Use a separate folder of leases, so that tests wait neither for sweeps nor for another worker."""
    os.environ[VARIABLE] = str(tmp_path_factory.mktemp("leases"))


@pytest.fixture(scope="session", autouse=True)
def _imports_are_no_garbage():
    """Exclude imported objects from garbage collection, which would take a sixth of the time.

    At the end exclude everything: pytest would collect garbage five times, and Python once more.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _imported_once():
    """Let the fork server also import the modules that tests run on ranks, which saves 0.3 s per rank."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "PRELOAD", "tests.support.preloaded")
        yield


@pytest.fixture(scope="session")
def launcher():
    """Return a launcher whose fork server has imported everything, so that no test waits for imports."""
    LocalNode().import_all()
    return Launcher()


@pytest.fixture(scope="module", autouse=True)
def _sweeps_draw_nothing(request):
    """Draw no figures, which take most of a report's time, except in analysis tests and new processes."""
    if "analysis" in request.path.relative_to(Path(__file__).parent).parts:
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("analysis.report.draw_figures", lambda *_: [])
        yield


@pytest.fixture
def sigint_raises():
    """Let SIGINT raise KeyboardInterrupt, also if pytest was started with it ignored, as after `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def short_grace(monkeypatch):
    """Shorten the wait for other ranks after one has failed."""
    monkeypatch.setattr("bench.run.cell.rank_watch.GRACE_S", 1.0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests with a launcher as `ranks`; deselect slow tests unless the mark expression names them."""
    for item in items:
        if "launcher" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
    wanted = config.getoption("markexpr")
    if "slow" not in wanted:
        named = {item for item in items if "fault" in wanted and item.get_closest_marker("fault")}
        slow = {item for item in items if item.get_closest_marker("slow") and item not in named}
        config.hook.pytest_deselected(items=[*slow])
        items[:] = [item for item in items if item not in slow]
    _one_worker_for_the_server(items)


def _one_worker_for_the_server(items):
    """Give one worker nearly all tests that start ranks or use a GPU, and the other worker the rest."""
    for item in items:
        on_server = "launcher" in getattr(item, "fixturenames", ()) or item.get_closest_marker("gpu")
        shares = on_server and item.path.name not in LAST
        item.add_marker(pytest.mark.xdist_group(SERVER if shares else item.location[0]))
    group_of = {item: item.get_closest_marker("xdist_group").args[0] for item in items}
    sizes = Counter(group_of.values())
    slow = {group for item, group in group_of.items() if item.get_closest_marker("ranks")}

    def place(item):
        group = group_of[item]
        last = LAST.index(item.path.name) + 1 if item.path.name in LAST else 0
        return group != SERVER, last, group not in slow, -sizes[group], group

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _only_marked_tests_start_ranks(request, monkeypatch):
    if not request.node.get_closest_marker("ranks"):
        message = "this test starts ranks: mark it with pytest.mark.ranks"
        monkeypatch.setattr(Launcher, "run", lambda *_, **__: pytest.fail(message))


@pytest.fixture
def fake_gpus(launcher):
    """Simulate two GPUs on the CPU."""
    from tests.support.cuda.fake_cuda import with_fake_gpus  # imports torch and the code of ranks

    with with_fake_gpus(launcher):
        yield
