"""What Hydra composes of words: the cells that they ask for, and each cell's values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from bench.labels import duration_label
from bench.request.choices import CONF, Raw, register_plugins_with_hydra
from bench.request.variables import refuse_secret_variables

SWEEP_PATHS = ("new_sweep_dir", "hydra_dir")
"""Resolvers of conf/config.yaml that only a sweep can fill in."""
SILENT_S = 10.0
"""Hydra takes nearly a tenth of a second a cell: a sweep that it composes for longer says so first."""


def composed(*overrides: str) -> Raw:
    """What the command line would compose of these words, for a cell that belongs to no sweep."""
    refuse_secret_variables()
    for name in SWEEP_PATHS:
        OmegaConf.register_new_resolver(name, lambda: "", replace=True)
    register_plugins_with_hydra()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plain(compose("config", [*overrides]))


def cells_of(words: Sequence[str], loader: ConfigLoader) -> list[list[str]]:
    """The words of every cell of a sweep, in order; of a key that is given twice the last counts."""
    overrides = OverridesParser.create(loader).parse_overrides([*words])
    axes = {each.get_key_element(): words_of(each) for each in overrides}
    return [[*cell] for cell in product(*axes.values())]


def words_of(override: Override) -> list[str]:
    """One word for each of its values."""
    if not override.is_sweep_override():
        assert override.input_line is not None
        return [override.input_line]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def composed_cells(
    cells: Sequence[list[str]], compose_one: Callable[[list[str]], DictConfig]
) -> Iterator[Raw]:
    """What each cell's words compose to; after the first, a line that says how long many others take."""
    for number, words in enumerate(cells):
        begun = time.perf_counter()
        raw = plain(compose_one(words))
        left_s = (len(cells) - 1) * (time.perf_counter() - begun)
        if number == 0 and left_s > SILENT_S:
            print(f"composing {len(cells)} cells: about {duration_label(left_s)}", flush=True)
        yield raw


def plain(configuration: DictConfig) -> Raw:
    """A configuration that Hydra composed, without Hydra's own part, as plain values."""
    with open_dict(configuration):
        configuration.pop("hydra", None)
    content = OmegaConf.to_container(configuration, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
