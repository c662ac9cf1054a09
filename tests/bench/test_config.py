"""Validation of cells, and their conversion to JSON and back."""

import json
from dataclasses import replace

import pytest

from bench.common.environment import REPOSITORY
from bench.config import Cell, ConfigError
from bench.plan.stored import read_plan
from tests.support.cells import FOUR_H100, make_cell
from tests.support.records import read_lines

WORDS = ("strategy=torch_cp", "strategy.rotation=alltoall", "++env.NCCL_DEBUG=INFO", "measure.budget_s=20")


@pytest.mark.parametrize("words", [(), WORDS, ("workload=attention", "cluster.memory_limit_gib=0.5")])
def test_cell_survives_the_json_round_trip(words):
    cell = make_cell(*words, machine=FOUR_H100)
    assert Cell.from_flat(json.loads(json.dumps(cell.flat()))) == cell


IMPOSSIBLE = {
    "no tokens": ({"seq_len": 0}, "Expected `int` >= 1 - at `$.seq_len`"),
    "no sequence": ({"batch": 0}, "$.batch"),
    "no ranks": ({"cluster.world_size": 0}, "$.cluster.world_size"),
    "ranks that nodes do not share": ({"cluster.nodes": 3}, "write for example cluster.world_size=3"),
    "no layers": ({"model.num_layers": 0}, "$.model.num_layers"),
    "no step": ({"measure.steps": 0}, "$.measure.steps"),
    "time that never ends": ({"measure.budget_s": float("nan")}, "$.measure.budget_s"),
    "an unknown dtype": ({"dtype": "bfloat16"}, "'^(bf16|fp16|fp32|fp64)$' - at `$.dtype`"),
    "an unknown mask": ({"workload.mask": "spiral"}, "$.workload.mask"),
    "prompts only": ({"data.prompt_tokens": 8192}, "leaves no token of seq_len=8192 to train on"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_invalid_cell_is_refused(case):
    changes, message = IMPOSSIBLE[case]
    with pytest.raises(ConfigError) as raised:
        Cell.from_flat(make_cell("seq_len=8k").flat() | changes)
    assert message in str(raised.value)


def test_cell_id_is_stable():
    """Resuming a sweep finds records by this id. A new field of Cell changes it, which must be intended."""
    assert make_cell("seq_len=8k", "strategy=ring", "engine=zero3").cell_id == "c3d222c289df"


def test_cell_id_of_a_trained_model_does_not_name_its_folder():
    cell = make_cell("seq_len=2k")
    ids = {
        replace(cell, model=replace(cell.model, path=path)).cell_id
        for path in ("/here/cells/0-0/trained_ring", "there/cells/0-0/trained_ring", "/here/mine")
    }
    assert len(ids) == 2


@pytest.mark.parametrize("folder", ["cpu", "h100/one_gpu", "h100/correctness"])
def test_cell_ids_of_reference_records_are_stable(folder):
    for record in read_lines(REPOSITORY / "results" / "reference" / folder / "records.jsonl"):
        assert Cell.from_flat(record["config"]).cell_id == record["cell_id"]


def test_cells_of_reference_plans_survive_the_round_trip():
    for path in REPOSITORY.glob("results/reference/**/config.yaml"):
        _, cells = read_plan(path.parent)
        for cell in cells:  # a later field has its default
            cell.pop("measure.gradients")  # a setting that is gone
            assert Cell.from_flat(cell).flat() | cell == Cell.from_flat(cell).flat()
