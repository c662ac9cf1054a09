"""`ulysses_ring_bench` is ours whatever lies beside somebody's script, and `bench` is then theirs."""

import os
import subprocess
import sys

import pytest

import bench
import ulysses_ring_bench
from bench.environment import REPOSITORY
from ulysses_ring_bench.own_modules import own_module

THEIRS = "assert (bench.WHOSE, analysis.WHOSE) == ('theirs', 'theirs')"
OURS = "from ulysses_ring_bench import Facts, RunConfig, Schedule, read_records"
SCRIPTS = {
    "theirs first": f"import bench, analysis\n{THEIRS}\n{OURS}\n{THEIRS}",
    "ours first": f"{OURS}\nimport bench, analysis\n{THEIRS}",
    "what ours imports is ours": (
        "import sys, bench\nfrom ulysses_ring_bench.own_modules import own_module\n"
        "frame = own_module('analysis.frame.load')\n"
        "passes = own_module('bench.passes').PASSES\n"
        "assert frame.HARDWARE_FOLDER.is_dir() and 'parity' in passes\n"
        "assert own_module('bench.node.server').PRELOAD == 'ulysses_ring_bench.bench.node.preload'\n"
        "assert [n for n in sys.modules if n.partition('.')[0] in ('bench', 'analysis')] == ['bench']"
    ),
    "only analysis is theirs": (
        "import sys\n"
        "import shutil; shutil.rmtree('bench')\n"
        "from ulysses_ring_bench.own_modules import own_module\n"
        "own_module('analysis.frame.load')\nimport bench\n"
        "assert own_module('bench.config') is sys.modules['bench.config']\n"
        "assert 'ulysses_ring_bench.bench.config' not in sys.modules"
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_beside_folders_of_the_same_names(tmp_path, case):
    for name in ("bench", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (tmp_path / "train.py").write_text(SCRIPTS[case])
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_where_bench_is_ours_both_names_give_the_same():
    assert own_module("bench.config") is sys.modules["bench.config"]
    assert ulysses_ring_bench.RunConfig is bench.RunConfig
    assert dir(ulysses_ring_bench) == sorted(bench.HOMES)
    with pytest.raises(AttributeError, match="'ulysses_ring_bench' has no attribute 'Offer'"):
        ulysses_ring_bench.Offer  # noqa: B018
