"""Table of passes: their folders, their time, their evidence and the order of their gates."""

from pathlib import Path

import bench.measure
from bench.measure import PASS_NAMES, PASSES, evidence_sections, first_failure, load_pass_class, own_work_s
from bench.measure.facts import RankReport
from tests.support.cells import make_cell

FOLDER = Path(bench.measure.__file__).parent


def test_every_pass_folder_has_a_section_and_rank_code():
    assert {path.parent.name for path in FOLDER.glob("*/section.py")} == set(PASS_NAMES) == set(PASSES)
    for name, facts in PASSES.items():
        assert (facts.name, load_pass_class(name).__module__) == (name, f"bench.measure.{name}.rank")


def test_own_work_s_counts_only_passes_that_are_own_work():
    phases_s = {"join": 1.0, "build": 2.0, "losses": 4.0, "timing": 8.0, "trace": 16.0, "finish": 32.0}
    assert own_work_s(RankReport({}, phases_s)) == 24.0


def test_evidence_has_the_sections_of_checks_and_no_speed():
    assert set(evidence_sections(dict.fromkeys(PASSES, "a section"))) == {
        "parity", "objective", "updates", "losses", "engagement", "full_length", "positions", "quality",
    }  # fmt: skip


def test_gates_run_in_order_and_only_for_sections_that_exist(monkeypatch):
    gates = []
    for name, facts in PASSES.items():
        monkeypatch.setattr(facts, "gate", lambda *_, name=name: gates.append(name))
    assert first_failure(make_cell(), {name: name != "losses" or None for name in PASSES}) is None
    assert sorted(gates) == sorted({*PASS_NAMES} - {"losses"})
    in_order = ["objective", "parity", "attention", "engagement", "trace", "full_length", "updates"]
    assert [name for name in gates if name in in_order] == in_order
