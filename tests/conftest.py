"""One fork server for the whole session, as a sweep has one, and which tests start ranks."""

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
"""The group of tests that share a fork server: a second one would import everything again."""
LAST = (
    "test_training_equivalence.py", "test_traced_ranks.py", "test_strategies.py",
    "test_attention_workload.py", "test_full_length.py", "test_allocations.py",
    "test_choices_together.py", "test_embedding.py", "test_weights.py", "test_call_memory.py",
)  # fmt: skip
"""Files that whichever worker is done first takes, with a server of its own, so that both end together; the
longest first."""
register()  # the modes that the command adds
gc.set_threshold(200_000, 20, 100)  # tests keep much: to search it for garbage took a seventh of their time
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers have a core each
    os.environ["OMP_WAIT_POLICY"] = "passive"  # ranks with two threads wait without taking the other's core


@pytest.fixture(scope="session", autouse=True)
def _own_leases(tmp_path_factory):
    """Tests do not wait for whoever measures on this machine, nor for those of another worker."""
    os.environ[VARIABLE] = str(tmp_path_factory.mktemp("leases"))


@pytest.fixture(scope="session", autouse=True)
def _imports_are_no_garbage():
    """What was imported stays: to search it for garbage again and again takes a sixth of the time.

    At the end everything stays: pytest would search it five times, and Python once more.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _imported_once():
    """The fork server imports what tests run on ranks, too, which take 0.3 s each otherwise."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "PRELOAD", "tests.support.preloaded")  # whatever a test starts the server for
        yield


@pytest.fixture(scope="session")
def launcher():
    """Its server has imported everything: how long a test takes does not hang on whether it is the first."""
    LocalNode().import_all()
    return Launcher()


@pytest.fixture(scope="module", autouse=True)
def _sweeps_draw_nothing(request):
    """Figures are most of a report's time: the tests of analysis draw them, and one sweep from its start."""
    if "analysis" in request.path.relative_to(Path(__file__).parent).parts:
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("analysis.report.draw_figures", lambda *_: [])
        yield


@pytest.fixture
def sigint_raises():
    """Ctrl-C interrupts, also where pytest was started with SIGINT ignored, as after `&` in a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def short_grace(monkeypatch):
    """Wait less long for the other ranks once one has failed."""
    monkeypatch.setattr("bench.run.cell.rank_watch.GRACE_S", 1.0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Whoever has a launcher starts ranks; whole grids run only where an expression names them."""
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
    """One worker gets nearly all that starts ranks of the fork server or uses a GPU, the other the rest."""
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
        said = "this test starts ranks: mark it with pytest.mark.ranks"
        monkeypatch.setattr(Launcher, "run", lambda *_, **__: pytest.fail(said))


@pytest.fixture
def fake_gpus(launcher):
    """Two GPUs that the CPU plays."""
    from tests.support.cuda.fake_cuda import gpus_played  # it imports torch and all that ranks do

    with gpus_played(launcher):
        yield
