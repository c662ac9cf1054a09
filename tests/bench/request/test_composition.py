"""A cell is composed as Hydra would, though files that several cells choose are read once."""

import re

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from bench.request.choices import CONF, groups, options
from bench.request.composition import EXPERIMENT, SWEEP_PATHS, composed, composed_cells, plain

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
    "a section as a value": ("model=qwen3_4b", "model.num_layers=2", "model={num_layers: 4}"),
}
REFUSED = {
    "an unknown key": ("seqlen=8k",),
    "an unknown choice after a bad value": ("measure.foo=1", "strategy=ulises"),
    "several values": ("seq_len=8k,64k",),
    "a value taken away that is another": ("~seq_len=9k",),
    "a choice that is added": ("+strategy=ring",),
    "a choice that is moved": ("strategy@model=ring",),
    "a key that is there": ("+seq_len=8k",),
}


def by_hydra(words, **more):
    """All words to Hydra at once."""
    for name in SWEEP_PATHS:
        OmegaConf.register_new_resolver(name, lambda: "", replace=True)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [*words], **more)


@pytest.mark.parametrize("case", ASKED)
def test_a_cell_is_what_hydra_composes_of_all_its_words(case):
    assert composed(*ASKED[case]) == plain(by_hydra(ASKED[case]))


@pytest.mark.parametrize("case", REFUSED)
def test_what_hydra_refuses_is_refused_in_the_same_words(case):
    with pytest.raises(HydraException) as refused:
        by_hydra(REFUSED[case])
    with pytest.raises(type(refused.value)) as found:
        composed(*REFUSED[case])
    assert str(found.value) == str(refused.value)


def test_hydra_composes_the_defaults_once_for_all_cells_and_no_cell_holds_another_s_values():
    cells = [
        ("strategy=ring", "seq_len=1k"), ("strategy=ring", "batch=2"), ("strategy=usp", "seq_len=1k"),
        ("strategy=usp", "engine=ddp", "model=qwen3_8b"), ("experiment=loss_equivalence", "engine=ddp"),
    ]  # fmt: skip
    read = []

    def read_files(words):
        read.append(words)
        return by_hydra(words, return_hydra_config=True)

    found = [*composed_cells(cells, read_files)]
    assert read == [(), ("experiment=loss_equivalence", "engine=ddp")]
    assert found == [plain(by_hydra(words)) for words in cells]


OPTIONS = {name: options(name) for name in groups() if name != EXPERIMENT}
ROUNDS = max(map(len, OPTIONS.values()))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=pytest.mark.slow if number > 2 else ()) for number in range(ROUNDS)]
)
def test_every_file_is_put_where_hydra_puts_it(number):
    words = [f"{name}={each[number % len(each)]}" for name, each in OPTIONS.items()]
    assert composed(*words) == plain(by_hydra(words))


def test_no_file_but_an_experiments_fills_more_than_its_section():
    files = [path for path in CONF.glob("*/*.yaml") if path.parent.name != EXPERIMENT]
    assert files
    assert not [
        path for path in files if re.search(r"^# @package|^defaults:", path.read_text(), re.MULTILINE)
    ]
