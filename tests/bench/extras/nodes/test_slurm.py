"""Sweeps under a real Slurm: a batch script, scancel, a killed agent, and wrong requests."""

import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bench.common.environment import REPOSITORY
from tests.support.command import run_command_here
from tests.support.records import read_lines
from tests.support.slurm import GPUS, NODES, slurm
from tests.support.waiting import wait_until

QUICK = (
    "cluster.device=cpu", "measure.trace=false", "measure.repeats=1", "measure.reference_budget_s=0",
    "lease=none", "cluster.interface=lo",
)  # fmt: skip
"""Both nodes are this machine, which only one agent could lease; `lease=none` lets both run."""
LONG_ENOUGH = ("seq_len=256", "dtype=fp32", "measure.steps=200", "measure.budget_s=60")
"""Steps for about twenty seconds, so that a cell can be interrupted between them."""
DETECTED_S = 3.0


@pytest.fixture(scope="module")
def cluster():
    with slurm() as started:
        yield started


@pytest.fixture
def submitted(cluster, tmp_path):
    """Return a function that submits the script of docs/nodes.md in a folder that looks like a checkout."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(
        f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    )
    (tmp_path / "run_sweep.py").symlink_to(REPOSITORY / "run_sweep.py")
    (tmp_path / "sweep.sh").write_text(documented_script())

    def submit(*words):
        return int(cluster.run("sbatch", "--parsable", "--output=%j.txt", "sweep.sh", *words, cwd=tmp_path))

    return submit


def documented_script():
    text = (REPOSITORY / "docs" / "nodes.md").read_text()
    [script] = re.findall(r"^    (#!/bin/bash\n(?:    .*\n)+)", text, flags=re.MULTILINE)
    return script.replace("\n    ", "\n")


def records_of(folder):
    path = folder / "records.jsonl"
    return {record["cell_id"]: record for record in read_lines(path)} if path.exists() else {}


def gpus_of_agents(record):
    """Return the numbers of GPUs that Slurm gave the agents; nodes only record differences from the first."""
    first = record["environment"]
    variables = [node.get("inherited_env", first["inherited_env"]) for node in first["nodes"]]
    return {len(values["CUDA_VISIBLE_DEVICES"].split(",")) for values in variables}


def processes(name, value):
    """Return the processes with this variable in their environment."""
    matching = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                matching.append(process)
    return matching


def processes_of(number):
    """Return the running processes of a job, also those outside of its steps."""
    return processes("SLURM_JOB_ID", str(number))


def agent_on(node):
    """Return the process of the agent on a node."""
    agents = (
        process
        for process in processes("SLURMD_NODENAME", node)
        if "bench.extras.nodes" in process.cmdline()[1:4]
    )
    return next(agents, None)


def runs_ranks(node):
    """Return whether the fork server of a node's agent has at least two child processes."""
    agent = agent_on(node)
    servers = [] if agent is None else agent.children()
    return any(len(server.children()) >= 2 for server in servers)


@pytest.mark.slow
@pytest.mark.ranks
def test_documented_script_survives_scancel_and_can_be_resumed(cluster, submitted, tmp_path):
    assert len(documented_script().splitlines()) <= 10
    words = (*QUICK, *LONG_ENOUGH, "strategy=local,ring", "sweep_dir=out")
    number = submitted(*words)
    wait_until(lambda: records_of(tmp_path / "out"), 120)
    wait_until(lambda: runs_ranks("node2"), 30)
    time.sleep(5)
    cluster.run("scancel", str(number))
    job, output = cluster.wait_for(number, 60), (tmp_path / f"{number}.txt").read_text()
    assert job["JobState"] == "CANCELLED"
    statuses = {
        record["config"]["strategy"]: record["status"] for record in records_of(tmp_path / "out").values()
    }
    assert statuses == {"local": "ok", "ring": "interrupted"}, output
    assert (tmp_path / "out" / "report.html").stat().st_size > 0
    assert processes_of(number) == []

    number = submitted(*words, "resume=true")
    job, output = cluster.wait_for(number, 180), (tmp_path / f"{number}.txt").read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), output
    records = {record["config"]["strategy"]: record for record in records_of(tmp_path / "out").values()}
    assert {name: record["status"] for name, record in records.items()} == {"local": "ok", "ring": "ok"}
    assert [node["host"] for node in records["ring"]["environment"]["nodes"]] == list(NODES)
    assert gpus_of_agents(records["ring"]) == {GPUS}


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_agent_costs_only_cells_that_need_its_node(cluster, tmp_path):
    """The sweep starts as salloc starts it on a node, with variables that ask for several tasks."""
    words = ("cluster=slurm", *QUICK, "seq_len=256,512", "strategy=local,ring", *LONG_ENOUGH[1:])
    asked = ("salloc", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=2", "--quiet")
    on_a_node = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--gpus-per-node=4", "--quiet")
    command = [*asked, *on_a_node, sys.executable, REPOSITORY / "run_sweep.py", "-m", *words, "sweep_dir=out"]
    launcher = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: records_of(tmp_path / "out"), 120)
    wait_until(lambda: runs_ranks("node2"), 60)
    time.sleep(5)
    agent_on("node2").kill()
    wait_until(lambda: len(records_of(tmp_path / "out")) >= 2, DETECTED_S)
    output, _ = launcher.communicate(timeout=180)
    assert launcher.returncode == 1, output
    records = {
        (record["config"]["strategy"], record["config"]["seq_len"]): record
        for record in records_of(tmp_path / "out").values()
    }
    assert {key: record["status"] for key, record in records.items()} == {
        ("local", 256): "ok", ("ring", 256): "killed", ("local", 512): "ok", ("ring", 512): "killed",
    }  # fmt: skip
    lost, without = records["ring", 256], records["ring", 512]
    assert (lost["failure"]["kind"], lost["failure"]["node"]) == ("NODE_LOST", "node2")
    assert "1 of 2 nodes are left, the cell needs 2" in without["reason"]
    assert gpus_of_agents(records["local", 256]) == {4}
    assert re.search(
        r"2 of 4 cells failed; to run them again: .* resume=true sweep_dir=out$", output, re.MULTILINE
    )
    wait_until(lambda: not cluster.run("squeue", "-h"), 30)


@pytest.mark.parametrize(
    ("variables", "refusal"),
    [
        (
            {"SLURM_JOB_NODELIST": ""},
            "no Slurm allocation (SLURM_JOB_NODELIST is not set); start the sweep by sbatch",
        ),
        (
            {"SLURM_GPUS_PER_NODE": "8"},
            "the job has GPUs (SLURM_GPUS_PER_NODE=8), but none is visible here",
        ),
    ],
    ids=["outside of an allocation", "on a login node"],
)
def test_sweep_that_cannot_use_slurm_is_refused_in_one_line(tmp_path, variables, refusal):
    for more in ((), ("--plan",)):
        done = run_command_here(tmp_path, *more, "-m", "cluster=slurm", "seq_len=256", **variables)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert refusal in line
