"""Whole sweeps over two nodes that share nothing but a network."""

import time

import psutil
import pytest

from bench.strategies import STRATEGIES
from tests.support.cells import INSTALLED
from tests.support.command import run_command
from tests.support.namespaces import ssh_cluster
from tests.support.records import read_lines
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FAST = ("measure.repeats=1", "measure.trace=false", "measure.warmup_steps=0")
SHARING = [name for name in INSTALLED if STRATEGIES[name].shares_sequences]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ssh_cluster(tmp_path_factory.mktemp("nodes")) as started:
        yield started


def test_strategies_give_equal_numbers_on_one_and_two_nodes(cluster, tmp_path):
    heads = ("model=qwen3_nano", "model.num_kv_heads=4")  # FPDT splits KV heads over all four ranks
    words = (*FAST, *heads, "seq_len=1k", "measure.steps=3", "cluster.world_size=4")
    words += (f"strategy={','.join(SHARING)}",)
    two = {record["config"]["strategy"]: record for record in cluster.records(tmp_path / "two", *words)}
    run_command(tmp_path, "-m", "cluster=cpu", *words, f"sweep_dir={tmp_path / 'one'}", OMP_NUM_THREADS="1")
    one = read_lines(tmp_path / "one" / "records.jsonl")
    assert {record["config"]["strategy"] for record in one} == set(two) == set(SHARING)
    for record in one:
        other = two[record["config"]["strategy"]]
        assert (record["status"], other["status"]) == ("ok", "ok"), (record["reason"], other["reason"])
        assert [node["host"] for node in other["environment"]["nodes"]] == cluster.nodes.names
        for name in ("loss", "grad_norm"):
            assert other["losses"][name] == record["losses"][name]
        assert other["engagement"]["sent_bytes"] == record["engagement"]["sent_bytes"]


LONG = (
    "seq_len=4k,8k", "cluster.world_size=4", "strategy=local,ring", "measure.steps=100",
    "measure.budget_s=60",
)  # fmt: skip


def rank_processes():
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "forkserver" in " ".join(process.info["cmdline"] or [])
    ]


def test_cut_link_is_a_record_within_10_s_and_the_sweep_goes_on(cluster, tmp_path):
    records = tmp_path / "records.jsonl"
    with cluster.sweep(tmp_path, *FAST, *LONG, "measure.reference_budget_s=0") as launcher:
        wait_until(lambda: len([*tmp_path.glob("cells/*")]) == 2, 240)  # the second cell needs both nodes
        time.sleep(10)
        cluster.nodes.set_link(1, "down")
        cut_at_s = time.monotonic()
        wait_until(lambda: len(read_lines(records)) == 2, 10)
        print(f"a record after {time.monotonic() - cut_at_s:.1f} s")
        output, _ = launcher.communicate(timeout=600)
        cluster.nodes.set_link(1, "up")
        assert launcher.returncode == 1, output
    _, lost, alone, refused = read_lines(records)
    assert (lost["status"], lost["failure"]["kind"]) == ("killed", "NODE_LOST"), lost["reason"]
    assert lost["failure"]["node"] == "host1"
    assert (alone["status"], alone["config"]["strategy"]) == ("ok", "local"), alone["reason"]
    assert "1 of 2 nodes are left, the cell needs 2" in refused["reason"]
    wait_until(lambda: not rank_processes(), 30)
