import json
import re

import pytest

from analysis.answers.published import decided_claims
from analysis.answers.verdict import verdict
from analysis.cells.cells import Cells
from analysis.claims import main
from analysis.frame.archive import read_archive
from analysis.page.page import render
from bench.config import ExitCode
from bench.environment import REPOSITORY
from tests.analysis.records import make_record, make_timing, write_sweep

CPU_SWEEP = REPOSITORY / "results" / "reference" / "cpu"
OF_BASE = "hf-ulysses-revB-tput-sp1-8k"
BASE = {
    "model": "qwen3_4b", "strategy": "local", "cluster.world_size": 1, "sp_degree": 1, "seq_len": 8192,
    "grad_accum": 8, "checkpointing": True, "loss": "untiled", "tiled_mlp": False,
    "offload.activations": False, "offload.optimizer": False,
}  # fmt: skip


@pytest.fixture
def told(capsys):
    """What the command prints, and its exit code."""

    def run(*words):
        code = main([*map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_command_prints_each_verdict_with_its_reason_and_the_counts(told):
    code, out, _ = told(CPU_SWEEP, "--id", "hf-ulysses-*-64k")
    assert code == ExitCode.OK
    lines = out.splitlines()
    assert "hf-ulysses-revB-speedup-64k: inconsistent with the model" in lines
    assert lines[-1].startswith("5 claims: ")
    assert "3.70 x claimed" in out
    assert re.search("^    the nearest of [0-9]+ measured records has .*hardware=cpu", out, re.MULTILINE)


def test_one_json_object_a_claim(told):
    code, out, _ = told("--group", "eval-lengths", "--json")
    assert code == ExitCode.OK
    found = [json.loads(line) for line in out.splitlines()]
    assert {each["verdict"] for each in found} == {"not comparable"}
    assert all(any(field["is_decisive"] for field in each["differences"]) for each in found)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere: no file records.jsonl in this folder; name a sweep's folder"),
        (["--group", "hf"], "--group hf: no such group of claims; take one of"),
        (["--id", "hg-*"], "--id hg-*: no claim has such an id"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(told, words, line):
    code, out, err = told(*words)
    assert (code, out) == (ExitCode.REQUEST_WRONG, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_sweep_decides_what_was_published_of_its_set_up(tmp_path):
    timing = make_timing([[8e3 * 8192 / 3633] * 8], 8 * 8192)
    ours, theirs = make_record(), make_record(config=BASE, timing=timing)
    neither = read_archive([write_sweep(tmp_path / "ours", [ours])], {}).frame
    assert decided_claims(neither) is None
    archive = read_archive([write_sweep(tmp_path / "theirs", [ours, theirs])], {})
    found = decided_claims(archive.frame)
    rows = {row[0]: row[1] for row in found.rows}
    assert rows[OF_BASE] == "as published"
    assert rows["hf-ulysses-revA-tput-sp1-8k"] == "faster than published"
    assert "1 as published" in found.counts
    assert len(found.bearings) == 3
    cells = Cells.of_records(archive.frame)
    page = render(archive, cells, verdict(cells, None), [], None, claims=found)
    assert "<h2>Published numbers</h2>" in page
    assert f'<th scope="row">{OF_BASE}</th><td class="words">as published</td>' in page
