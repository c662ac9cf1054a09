"""Whole sweeps, from the command line to the report."""

import csv
import gzip
import json
import re

import pytest

from tests.support.command import run_command, run_command_here
from tests.support.records import read_lines

QUICK = ["measure.steps=2", "measure.warmup_steps=1", "measure.repeats=1"]


STALE = {
    "RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "9", "GROUP_RANK": "3",
    "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "5", "SLURM_NTASKS": "9", "SLURM_LOCALID": "5",
    "SLURM_JOB_ID": "1", "SLURM_NODELIST": "nowhere", "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMI_RANK": "2",
    "OMP_NUM_THREADS": "0", "CUDA_VISIBLE_DEVICES": "-1", "LC_ALL": "C", "COLUMNS": "20", "PYTHONPATH": None,
    "DS_ACCELERATOR": "cuda", "FORCE_COLOR": "1",
}  # fmt: skip
"""Variables of other launchers, and variables that expect a GPU."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run a short form of the README's command, from a cold start with stale variables; keep its traces."""
    folder = tmp_path_factory.mktemp("swept")
    words = ("-m", "seq_len=1k,1024", "sweep_dir=out", "measure.keep_traces=true", *QUICK)
    done = run_command(folder, *words, **STALE)
    assert (done.returncode, done.stderr) == (0, "")
    return done, folder / "out"


@pytest.fixture(scope="module")
def records(swept):
    lines = read_lines(swept[1] / "records.jsonl")
    return {(record["config"]["strategy"], record["config"]["seq_len"]): record for record in lines}


@pytest.mark.ranks
def test_sweep_writes_records_tables_figures_and_a_page(swept, records):
    _, out = swept
    strategies = ("local", "deepspeed_ulysses", "ring_flash_attn")
    assert set(records) == {(strategy, 1024) for strategy in strategies}
    for (strategy, _), record in records.items():
        assert record["status"] == "ok"
        assert record["losses"]["tokens_digest"] == record["losses"]["expected_digest"]
        assert min(record["memory"]["peak_allocated_bytes"]) > 0
        assert strategy == "local" or min(record["trace"]["purpose_total_ms"]["attention"]) > 0
        assert len(record["timing"]["step_times_ms"]) == record["config"]["cluster.world_size"]
    assert len({tuple(record["losses"]["tokens_digest"]) for record in records.values()}) == 1
    with (out / "summary.csv").open() as file:
        assert all(float(row["tokens_per_s"]) > 0 for row in csv.DictReader(file))
    written = ("summary.md", "report.html", "config.yaml", "figures/peak_memory.png")
    assert all((out / name).stat().st_size > 0 for name in written)
    modules = {strategy: record["engagement"]["modules"] for (strategy, _), record in records.items()}
    assert "deepspeed.runtime.sequence_parallel.ulysses_sp" in modules["deepspeed_ulysses"]
    assert "ring_flash_attn.zigzag_ring_flash_attn" in modules["ring_flash_attn"]
    logs = [path.read_text() for path in out.glob("cells/*/rank_0.log")]
    assert len(logs) == 3
    # torch 2.11 warns about every profiler that it "clears events at the end of each cycle".
    assert not any(
        "Warning" in log.replace("UserWarning: Warning: Profiler clears events", "") for log in logs
    )


@pytest.mark.ranks
def test_log_has_no_cursor_movements_with_forced_colours(swept):
    output = swept[0].stdout
    assert not re.search(r"\r|\x1b\[[0-9;?]*[A-LN-Za-ln-z]", output)  # anything but colours
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()
    assert [line[:6] for line in lines if line.startswith("[")] == ["[1/3] ", "[2/3] ", "[3/3] "]
    assert lines[-1] == "report: out/report.html"


@pytest.mark.ranks
def test_kept_traces_are_one_per_cell_and_rank_for_perfetto(swept, records):
    """Perfetto opens the gzipped JSON."""
    _, out = swept
    names = {path.name for path in (out / "traces").iterdir()}
    assert names == {
        f"{record['cell_id']}-{record['repeat']}-{rank}.json.gz"
        for record in records.values()
        for rank in range(record["config"]["cluster.world_size"])
    }
    for name in names:
        events = json.loads(gzip.decompress((out / "traces" / name).read_bytes()))["traceEvents"]
        parallel = not any(name.startswith(r["cell_id"]) for (s, _), r in records.items() if s == "local")
        assert any(event["name"].startswith("gloo:") for event in events) or not parallel


@pytest.mark.usefixtures("launcher")
def test_illegal_combination_in_a_sweep_is_a_record(tmp_path):
    words = (
        "-m", "seq_len=256", "strategy=ulysses", "sp_degree=2,3", "sweep_dir=out",
        "measure.reference_budget_s=0", "measure.trace=false", *QUICK,
    )  # fmt: skip
    done = run_command_here(tmp_path, *words)
    records = read_lines(tmp_path / "out" / "records.jsonl")
    assert done.returncode == 0
    assert sorted(r["status"] for r in records) == ["ok", "unsupported"]
    assert "unsupported" in (tmp_path / "out" / "summary.md").read_text()
    again = run_command_here(tmp_path, *words)
    assert (again.returncode, "add resume=true" in again.stderr) == (2, True)


def test_bad_input_is_refused_in_one_line_with_exit_code_2(tmp_path):
    """Other wrong words are tried without a new process, in tests/bench/request/test_command_line.py."""
    done = run_command(tmp_path, "-m", "seq_len=1k,2k,3k,4k,5k,6k,8q")
    assert done.returncode == 2
    assert "seq_len=8q" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
