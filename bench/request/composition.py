"""Composition of requests with Hydra: the words of each cell of a sweep, and the values they compose to.

A word is one `key=value` of the command line.
"""

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
"""Resolvers in conf/config.yaml whose value is known only in a sweep."""
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
"""Parts of the names of environment variables whose values may be secret and must not get into records."""
UNANNOUNCED_CELLS = 100
"""Largest number of cells that a sweep composes without announcing it, which takes nearly 0.1 s a cell."""


def refuse_secret_variables() -> None:
    """Make OmegaConf raise ConfigError for `${oc.env:NAME}` if NAME may be a secret."""
    OmegaConf.register_new_resolver("oc.env", _environment_value, replace=True)


def _environment_value(name: str, *default: str | None) -> str | None:
    """Return the value of a variable as `oc.env` does; raise ConfigError if it may be a secret."""
    if any(word in name.upper() for word in SECRET_WORDS):
        raise ConfigError(f"{name} may be a secret, and records would hold it")
    return oc.env(name, *default)


def compose_words(*overrides: str) -> Raw:
    """Return the request that the words compose to, for a cell that belongs to no sweep."""
    refuse_secret_variables()
    for name in SWEEP_PATHS:
        OmegaConf.register_new_resolver(name, lambda: "", replace=True)
    register_plugins_with_hydra()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plain(compose("config", [*overrides]))


def sweep_cell_words(words: Sequence[str], loader: ConfigLoader) -> list[list[str]]:
    """Return the words of every cell of a sweep, in order; if a key occurs twice, its last word counts."""
    overrides = OverridesParser.create(loader).parse_overrides([*words])
    axes = {override.get_key_element(): value_words(override) for override in overrides}
    return [[*cell] for cell in product(*axes.values())]


def value_words(override: Override) -> list[str]:
    """Return one word `key=value` for each value of an override."""
    if not override.is_sweep_override():
        assert override.input_line is not None
        return [override.input_line]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def compose_cells(
    cells: Sequence[list[str]], compose_one: Callable[[list[str]], DictConfig]
) -> Iterator[Raw]:
    """Return the requests of the cells; print first how long composing them takes if there are many."""
    if len(cells) > UNANNOUNCED_CELLS:
        print(f"composing {len(cells)} cells, about {len(cells) // 10} s", flush=True)
    return (plain(compose_one(words)) for words in cells)


def plain(configuration: DictConfig) -> Raw:
    """Return a composed configuration as plain values, without the section of Hydra itself."""
    with open_dict(configuration):
        configuration.pop("hydra", None)
    content = OmegaConf.to_container(configuration, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}
