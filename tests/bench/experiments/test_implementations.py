"""`experiment=implementations`: who takes part, what each is compared with, and what the rows say."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest

from analysis.implementations import main as draw
from bench.attention import kernel_facts
from bench.compare_implementations.__main__ import main as compare
from bench.config import ConfigError, RunConfig
from bench.experiments.implementations import counterpart_of, implementation_cells, label_of
from bench.experiments.implementations_table import FILE, TABLE, markdown, rows_of
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.cells import FOUR_H100, TWO_CORES, make_cell, make_raw
from tests.command import typed_here


def cells_of(*words, machine=TWO_CORES):
    return implementation_cells([deepcopy(make_raw("experiment=implementations", *words))], machine)


@pytest.mark.parametrize("machine", [TWO_CORES, FOUR_H100])
def test_every_strategy_takes_part_and_packages_are_beside_ours(machine):
    cells = cells_of(machine=machine)
    assert {cell.strategy for cell in cells} == {f.name for f in STRATEGIES.usable() if f.shares_sequences}
    planned = {cell.cell_id for cell in cells}
    assert len({label_of(cell) for cell in cells}) == len(planned)
    for cell in cells:
        assert RunConfig.from_flat(json.loads(json.dumps(cell.flat()))) == cell
        ours = counterpart_of(cell)
        if ours is None or refusal(cell) is not None:
            continue
        assert ours.cell_id in planned
        assert STRATEGIES[ours.strategy].package is None
        assert ours.layout == cell.layout
        if STRATEGIES[cell.strategy].package is not None:
            assert ours.kernel == cell.kernel


def test_a_named_strategy_is_alone_with_ours():
    labels = [label_of(cell) for cell in cells_of("strategy=torch_cp", "strategy.rotation=alltoall")]
    assert labels == ["ring", "torch_cp rotation=alltoall"]


def test_what_a_package_cannot_do_is_planned_with_its_reason_and_without_ours():
    (cell,) = cells_of("strategy=ring_flash_attn", "dtype=fp32")
    assert "dtype=fp32 is not for ring_flash_attn" in refusal(cell)


def test_one_rank_compares_no_implementations():
    with pytest.raises(ConfigError, match="no ranks share a sequence"):
        cells_of("cluster.world_size=1")


def records_of(cell, calls_ms, status="ok", reason=None):
    """A record for each process, of two ranks, of which one is slower."""
    found = {
        "cell_id": cell.cell_id,
        "config": cell.flat(),
        "environment": {"packages": {"ring-flash-attn": "1.2"}, "gpus": []},
        "engagement": {"sent_bytes": {"attention": [10, 20], "data": [1, 1]}},
        "memory": {
            "forward_taken_bytes": [5, 5], "forward_kept_bytes": [2, 2], "backward_taken_bytes": [1, 7],
        },
        "parity": {"errors": {"out": 2**-7, "dq": 2**-8, "dk": 0.0, "dv": 0.0}},
        "attention": {"added_ms": None},
    }  # fmt: skip
    return [
        found
        | {"repeat": repeat, "status": "ok", "reason": None}
        | {"timing": {"step_times_ms": [[call_ms / 2, 1.0], [call_ms, 2 * call_ms]]}}
        | ({"status": status, "reason": reason} if repeat == 1 else {})
        for repeat, call_ms in enumerate(calls_ms)
    ]


RING, PACKAGE = (make_cell("workload=attention", f"strategy={name}") for name in ("ring", "ring_flash_attn"))
OURS_MS = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5]


@pytest.mark.parametrize(
    ("factor", "words", "slower"),
    [
        (1.2, "ours is faster", False),
        (1.0, "no clear difference", False),
        (0.8, "ours is slower by 25", True),
    ],
)
def test_the_verdict_follows_the_interval(factor, words, slower):
    records = [*records_of(RING, OURS_MS), *records_of(PACKAGE, [factor * each for each in OURS_MS])]
    ours, row = rows_of(records)
    assert (ours["counterpart"], ours["package"], ours["ours_is_slower"]) == (None, None, False)
    assert ours["call_ms"] == pytest.approx([1.5 * each for each in OURS_MS])
    assert (row["counterpart"], row["package"]) == ("ring", "ring-flash-attn 1.2")
    assert (row["sent_bytes"], row["peak_bytes"], row["error_ulps"]["out"]) == (21, 9, 1.0)
    assert row["ours_is_slower"] is slower
    assert any(words in line for line in markdown([ours, row]))


def test_a_package_that_calls_flash_attn_is_given_it_where_it_is_installed(monkeypatch):
    words = ("strategy=deepspeed_fpdt", "kernel=auto"), ("strategy=deepspeed_ulysses", "kernel=auto")
    named = ("strategy=ring_flash_attn", "kernel=torch_flash")
    assert {cell.kernel for cell in cells_of(*words[0], machine=FOUR_H100)} == {"torch_flash"}
    monkeypatch.setattr(kernel_facts, "installed", lambda _: "2.8.3")
    kernels = [{cell.kernel for cell in cells_of(*each, machine=FOUR_H100)} for each in (*words, named)]
    assert kernels == [{"flash_attn_2"}, {"torch_flash"}, {"torch_flash"}]
    assert {cell.kernel for cell in cells_of(*words[0])} == {"torch_flash"}


def test_the_table_says_where_our_stand_in_ran_and_what_we_add_to_a_call():
    ours, row = rows_of([*records_of(RING, OURS_MS), *records_of(PACKAGE, OURS_MS)])
    assert (ours["stand_in"], row["stand_in"], row["added_ms"]) == (False, True, None)
    assert any("on our stand-in for flash-attn" in line for line in markdown([row]))
    added = {"attention": {"added_ms": [[1.0, 2.0], [3.0, 4.0]]}}
    (row,) = rows_of([each | added for each in records_of(PACKAGE, OURS_MS)])
    assert row["added_ms"] == [3.5] * 6
    assert any("| 15.4, ours in it 3.5 |" in line for line in markdown([row]))
    on_flash_attn = records_of(replace(PACKAGE, kernel="flash_attn_2"), OURS_MS)
    assert not rows_of(on_flash_attn)[0]["stand_in"]


def test_what_fails_in_one_process_has_its_reason_and_no_time():
    records = [*records_of(RING, OURS_MS), *records_of(PACKAGE, OURS_MS, "crashed", "it is gone")]
    row = rows_of(records)[1]
    assert (row["reason"], row["call_ms"], row["ratio"], row["sent_bytes"]) == ("it is gone", [], None, None)
    assert any("did not run: it is gone" in line for line in markdown([row]))
    again = [*records, *records_of(PACKAGE, OURS_MS)]
    assert rows_of(again)[1]["reason"] is None


@pytest.mark.ranks
def test_the_command_runs_the_sweep_and_its_folder_can_be_drawn(tmp_path):
    words = ("strategy=ring_flash_attn", "seq_len=256", "measure.repeats=1", "measure.steps=1", "lease=none")
    done = typed_here(tmp_path, "--output=folder", *words, main=compare)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "folder"
    rows = json.loads((folder / FILE).read_text())["rows"]
    assert [(row["implementation"], row["reason"]) for row in rows] == [
        ("ring", None),
        ("ring_flash_attn", None),
    ]
    for row in rows:
        strategy = row["implementation"]
        cell = make_cell("workload=attention", f"strategy={strategy}", "seq_len=256")
        assert row["sent_bytes"] == STRATEGIES[strategy].exchange_bytes(cell)
        assert row["peak_bytes"] > 0
    assert "| `ring_flash_attn`" in (folder / TABLE).read_text()
    draw([str(folder)])
    assert (folder / "implementations_2_ranks_4_2_heads.svg").exists()
