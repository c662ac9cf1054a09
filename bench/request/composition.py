"""What Hydra composes of words: the cells that they ask for, and each cell's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.resolvers import oc

from bench.config import ConfigError
from bench.request.choices import CONF, Raw, register_plugins_with_hydra

SWEEP_PATHS = ("new_sweep_dir", "hydra_dir")
"""Resolvers of conf/config.yaml that only a sweep can fill in."""
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
"""Parts of names of variables whose values no record should hold."""
MANY = 100
"""Hydra takes nearly a tenth of a second a cell: of more cells a sweep says so first."""


def refuse_secret_variables() -> None:
    """From now on `${oc.env:NAME}` is an error where NAME may be a secret; others are as OmegaConf has it."""
    OmegaConf.register_new_resolver("oc.env", _value_of, replace=True)


def _value_of(name: str, *default: str | None) -> str | None:
    if any(word in name.upper() for word in SECRET_WORDS):
        raise ConfigError(f"{name} may be a secret, and records would hold it")
    return oc.env(name, *default)


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
    """What each cell's words compose to; a line before many."""
    if len(cells) > MANY:
        print(f"composing {len(cells)} cells, about {len(cells) // 10} s", flush=True)
    return (plain(compose_one(words)) for words in cells)


def plain(configuration: DictConfig) -> Raw:
    """A configuration that Hydra composed, without Hydra's own part, as plain values."""
    with open_dict(configuration):
        configuration.pop("hydra", None)
    content = OmegaConf.to_container(configuration, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
