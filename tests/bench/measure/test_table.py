"""The table of passes: each stands in a folder of its name, and is judged in the order of the table."""

from pathlib import Path

import bench.measure
from bench.measure import NAMES, PASSES, evidence, first_failure, own_work_s, rank_code
from bench.measure.facts import RankReport
from tests.support.cells import make_cell

FOLDER = Path(bench.measure.__file__).parent


def test_every_folder_is_a_pass_of_its_name_with_its_code_beside_its_section():
    assert {path.parent.name for path in FOLDER.glob("*/section.py")} == set(NAMES) == set(PASSES)
    for name, facts in PASSES.items():
        assert (facts.name, rank_code(name).__module__) == (name, f"bench.measure.{name}.rank")


def test_only_a_passs_own_seconds_are_no_fixed_cost():
    phases_s = {"join": 1.0, "build": 2.0, "losses": 4.0, "timing": 8.0, "trace": 16.0, "finish": 32.0}
    assert own_work_s(RankReport({}, phases_s)) == 24.0


def test_a_wrong_result_keeps_what_proves_it_and_no_speed():
    kept = evidence(dict.fromkeys(PASSES, "a section"))
    assert set(kept) == {
        "parity", "objective", "updates", "losses", "engagement", "full_length", "probe", "positions",
    }  # fmt: skip


def test_gates_are_asked_in_the_order_of_what_they_judge_and_only_of_what_ran(monkeypatch):
    asked = []
    for name, section in PASSES.items():
        monkeypatch.setattr(section, "gate", lambda *_, name=name: asked.append(name))
    assert first_failure(make_cell(), {name: name != "losses" or None for name in PASSES}) is None
    assert sorted(asked) == sorted({*NAMES} - {"losses"})
    in_time = ["objective", "parity", "attention", "engagement", "trace", "full_length", "updates"]
    assert [name for name in asked if name in in_time] == in_time
