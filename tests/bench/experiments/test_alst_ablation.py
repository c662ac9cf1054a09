"""`experiment=alst_ablation`: its rows, and that each saves on a rank what the formula says."""

from copy import deepcopy
from dataclasses import replace

import pytest

from bench.config import ConfigError
from bench.cost.weights import parameters
from bench.experiments.alst_ablation import ROWS, SMALL_MODEL
from bench.request.legality import refusal
from bench.sweep.plan import plan
from tests.cells import FOUR_H100, TWO_CORES, make_cell, make_raw
from tests.together import seen_inside, watch_offloading

MODEL = ("model=qwen3_nano", *(f"model.{name}={value}" for name, value in SMALL_MODEL.items()))


def rows(machine, **values):
    raw = deepcopy(make_raw("experiment=alst_ablation")) | {"sweep_dir": "out"} | values
    return plan([raw], machine, single=False, default_strategies=True).cells


@pytest.mark.parametrize("machine", [TWO_CORES, FOUR_H100, replace(FOUR_H100, gpus=FOUR_H100.gpus[:1])])
def test_a_row_adds_one_switch_and_every_step_has_as_many_tokens(machine):
    cells = [planned.cell for planned in rows(machine)]
    assert len(cells) == len(ROWS)
    assert [refusal(cell) for cell in cells] == [None] * len(ROWS)
    assert len({cell.tokens_per_step for cell in cells}) == len({cell.model for cell in cells}) == 1
    assert [cell.strategy for cell in cells] == ["local"] * 4 + ["deepspeed_ulysses"] * 4
    switched = [
        (c.checkpointing, c.offload.optimizer, c.loss == "chunked", c.offload.activations, c.tiled_mlp)
        for c in cells
    ]
    assert [sum(each) for each in switched] == [0, 1, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("values", [{"checkpointing": True}, {"grad_accum": 2}, {"loss": "chunked"}])
def test_what_the_rows_choose_is_refused(values):
    with pytest.raises(ConfigError, match=f"{next(iter(values))}=.* leave it out"):
        rows(TWO_CORES, **values)


def test_a_named_model_is_taken_as_it_is():
    raw = make_raw("experiment=alst_ablation", "model=qwen3_0_6b")
    assert {planned.cell.model.num_layers for planned in rows(TWO_CORES, model=raw["model"])} == {28}


def test_offloading_says_what_it_moves(launcher, tmp_path):
    common = ("strategy=local", "seq_len=1k", "model.vocab_size=64", "model.num_layers=2")
    switches = ("checkpointing=true", "offload.activations=true", "offload.optimizer=true")
    cells = {
        name: make_cell(*MODEL, *common, *own) for name, own in {"plain": (), "offload": switches}.items()
    }
    seen = {name: of[0] for name, of in seen_inside(launcher, tmp_path, cells, watch_offloading).items()}
    model = cells["offload"].model
    assert seen == {
        "plain": {"activations": None, "optimizer": None},
        "offload": {
            "activations": 2 * model.num_layers * model.hidden_size * 1024,
            "optimizer": (4 + 2) * parameters(model),
        },
    }
