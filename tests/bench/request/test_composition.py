"""Composition of cells by Hydra, and of sweeps as all combinations of values."""

import re

import pytest
from omegaconf import OmegaConf

from bench.request.choices import CONF
from bench.request.composition import compose_cells, compose_words, sweep_cell_words
from tests.support.cells import make_raw
from tests.test_untrusted import SOURCES

ASKED = {
    "values": ("seed=1", "seq_len=64k", "measure.steps=7", "data.path='a=b,c'", "seed=${batch}", "batch=3"),
    "choices and values of them": (
        "strategy.inner=ring",
        "strategy=usp",
        "hardware='cpu'",
        "++env.NCCL_ALGO=x",
    ),
    "a choice and another": ("model=qwen3_8b", "model=qwen3_4b", "model.num_layers=3"),
    "an experiment": ("experiment=loss_equivalence", "seq_len=1k"),
}


@pytest.mark.parametrize("case", ASKED)
def test_make_raw_equals_the_composition_of_hydra(case):
    assert make_raw(*ASKED[case]) == compose_words(*ASKED[case])


def test_cells_are_all_combinations_of_the_last_values_of_keys():
    cells = sweep_cell_words(
        ["strategy=local,ring", "engine=ddp", "seed=range(2)", "strategy=usp,ring"], None
    )
    assert cells == [
        [f"strategy={strategy}", "engine=ddp", f"seed={seed}"]
        for strategy in ("usp", "ring")
        for seed in (0, 1)
    ]


def test_large_sweep_is_announced_before_composing(capsys):
    for count, output in ((3, ""), (2000, "composing 2000 cells, about 200 s\n")):
        cells = compose_cells(
            [["word"]] * count, lambda words: OmegaConf.create({"hydra": {"a": "???"}, "seq_len": words[0]})
        )
        assert capsys.readouterr().out == output
        assert next(cells) == {"seq_len": "word"}


def test_no_source_imports_hydra_internals():
    assert not [path for path in SOURCES if "hydra._internal" in path.read_text()]


def test_only_experiment_files_set_keys_outside_their_section():
    files = [path for path in CONF.glob("*/*.yaml") if path.parent.name != "experiment"]
    assert files
    assert not [
        path for path in files if re.search(r"^# @package|^defaults:", path.read_text(), re.MULTILINE)
    ]
