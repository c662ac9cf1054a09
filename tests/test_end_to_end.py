"""What a user types, from the command line to the report."""

import csv
import gzip
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from bench.environment import REPOSITORY
from bench.store import read_records

COMMAND = [sys.executable, str(REPOSITORY / "run_sweep.py")]
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
"""The numbers below are of CPU ranks, also where there is a GPU."""
QUICK = ["measure.steps=2", "measure.warmup_steps=1"]


def sweep(folder, *words):
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=NO_GPU, capture_output=True, text=True, check=False
    )


def test_a_sweep_ends_in_records_tables_figures_and_a_page(tmp_path):
    done = sweep(tmp_path, "-m", "seq_len=1k,2k,2048", "sweep_dir=out", *QUICK)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "out" / "records.jsonl")
    found = {(r["config"]["strategy"], r["config"]["seq_len"]): r for r in records}
    assert set(found) == {
        (strategy, length)
        for strategy in ("local", "deepspeed_ulysses", "ring_flash_attn")
        for length in (1024, 2048)
    }
    for (strategy, _), record in found.items():
        assert record["status"] == "ok"
        assert record["losses"]["tokens_digest"] == record["losses"]["expected_digest"]
        assert min(record["memory"]["peak_allocated_bytes"]) > 0
        assert strategy == "local" or min(record["trace"]["purpose_total_ms"]["attention"]) > 0
        assert not (tmp_path / "out" / "traces").exists()
        assert len(record["timing"]["step_times_ms"]) == record["config"]["cluster.world_size"]
    for length in (1024, 2048):
        digests = {tuple(found[s, length]["losses"]["tokens_digest"]) for s, n in found if n == length}
        assert len(digests) == 1
    with (tmp_path / "out" / "summary.csv").open() as file:
        assert all(float(row["tokens_per_s"]) > 0 for row in csv.DictReader(file))
    written = ("summary.md", "report.html", "config.yaml", "figures/waterfall.png", "figures/throughput.svg")
    assert all((tmp_path / "out" / name).stat().st_size > 0 for name in written)
    assert "6/6" in done.stdout
    logs = [path.read_text() for path in (tmp_path / "out").glob("cells/*/rank_0.log")]
    assert len(logs) == 6
    assert not any("Warning" in log for log in logs)


def test_the_published_packages_own_code_ran(tmp_path):
    words = ("-m", "seq_len=1k", "strategy=deepspeed_ulysses,ring_flash_attn", "sweep_dir=out", *QUICK)
    assert sweep(tmp_path, *words, "measure.keep_traces=true").returncode == 0
    modules = {
        r["config"]["strategy"]: r["engagement"]["modules"]
        for r in read_records(tmp_path / "out" / "records.jsonl")
    }
    assert "deepspeed.runtime.sequence_parallel.ulysses_sp" in modules["deepspeed_ulysses"]
    assert "ring_flash_attn.zigzag_ring_flash_attn" in modules["ring_flash_attn"]
    assert not any("bench.strategies.ulysses.attention" in entered for entered in modules.values())
    # The same sweep kept its traces: one of each cell and rank, of which Perfetto opens the gzipped JSON.
    records = read_records(tmp_path / "out" / "records.jsonl")
    kept = {path.name for path in (tmp_path / "out" / "traces").iterdir()}
    assert kept == {f"{r['cell_id']}-{r['repeat']}-{rank}.json.gz" for r in records for rank in (0, 1)}
    for name in kept:
        events = json.loads(gzip.decompress((tmp_path / "out" / "traces" / name).read_bytes()))["traceEvents"]
        assert any(event["name"].startswith("gloo:") for event in events)


def test_resume_runs_only_what_is_missing(tmp_path):
    words = ("-m", "strategy=local", "engine=ddp", "sweep_dir=out", "measure.trace=false", *QUICK)
    assert sweep(tmp_path, "seq_len=256", *words).returncode == 0
    refused = sweep(tmp_path, "seq_len=256,512", *words)
    assert (refused.returncode, "resume=true" in refused.stderr) == (2, True)
    resumed = sweep(tmp_path, "seq_len=256,512", "resume=true", *words)
    assert "1 cell" in resumed.stdout
    lengths = [r["config"]["seq_len"] for r in read_records(tmp_path / "out" / "records.jsonl")]
    assert lengths == [256, 512]


def test_an_illegal_combination_in_a_sweep_is_a_record_and_no_failure(tmp_path):
    done = sweep(
        tmp_path, "-m", "seq_len=256", "strategy=ulysses", "sp_degree=2,3", "sweep_dir=out",
        "measure.trace=false", *QUICK,
    )  # fmt: skip
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert done.returncode == 0
    assert sorted(r["status"] for r in records) == ["ok", "unsupported"]
    assert "unsupported" in (tmp_path / "out" / "summary.md").read_text()


BAD = {
    "a bad length": (["seq_len=8q"], "seq_len=8q"),
    "a bad length in a sweep's seventh cell": (["-m", "seq_len=1k,2k,3k,4k,5k,6k,7q"], "seq_len=7q"),
    "several values without -m": (["seq_len=8k,16k"], "-m seq_len=8k,16k"),
    "an unknown strategy": (["strategy=ulyses"], "did you mean strategy=ulysses?"),
    "an unknown strategy in a sweep": (["-m", "strategy=local,ulyses"], "did you mean strategy=ulysses?"),
    "an unknown key": (["seqlen=8k"], "did you mean seq_len?"),
    "an unreadable word": (["seq_len=8(k)"], "cannot be read"),
    "a word without a value": (["seq_len"], "key=value"),
    "no steps": (["measure.steps=-1"], "measure.steps=-1"),
    "an illegal combination": (["strategy=ring_flash_attn", "dtype=fp32"], "dtype=bf16"),
    "a variable that is no axis": (["env.PATH=/"], "env.PATH"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2_and_leaves_nothing(tmp_path, case):
    words, said = BAD[case]
    done = sweep(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_can_be_shown_without_running(tmp_path):
    done = sweep(tmp_path, "--cfg", "job", "strategy=ring_flash_attn")
    assert done.returncode == 0
    assert "name: ring_flash_attn" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_s_signal_ends_a_sweep_as_ctrl_c_does(tmp_path):
    words = ["-m", "seq_len=16k", "strategy=local", "engine=ddp", "sweep_dir=out", "measure.budget_s=100"]
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=NO_GPU, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/cells/*/rank_0.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "resume=true" in said.splitlines()[-1]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    (record,) = read_records(tmp_path / "out" / "records.jsonl")
    assert record["status"] == "interrupted"


@pytest.mark.parametrize("words", [["sweep_dir=typo"], []])
def test_a_sweep_that_is_not_there_is_not_resumed(tmp_path, words):
    done = sweep(tmp_path, "resume=true", "strategy=local", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "does not exist; name the folder" in done.stderr
    assert list(tmp_path.iterdir()) == []
