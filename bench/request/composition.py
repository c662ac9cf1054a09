"""What Hydra composes of words: the defaults once for all cells, files and values put in by cell.

Hydra takes a tenth of a second a cell, nearly all of it for the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from bench.request.choices import CONF, Raw, groups, options, read_option, register_plugins_with_hydra
from bench.request.variables import refuse_secret_variables

EXPERIMENT = "experiment"
SWEEP_PATHS = ("new_sweep_dir", "hydra_dir")
"""Resolvers of conf/config.yaml that only a sweep can fill in."""

ReadFiles = Callable[[tuple[str, ...]], DictConfig]
"""A configuration of the files that these words choose."""


def composed_cells(cells: Sequence[Sequence[str]], read_files: ReadFiles) -> Iterator[Raw]:
    """What each cell's words compose to, without Hydra's own part, which `read_files` has."""

    def read(words: tuple[str, ...]) -> DictConfig:
        configuration = read_files(words)
        with open_dict(configuration):
            del configuration["hydra"]
        return configuration

    files = Files(read)
    return (_composed(words, files) for words in cells)


def composed(*overrides: str) -> Raw:
    """What the command line would compose of these words, for a cell that belongs to no sweep."""
    refuse_secret_variables()
    for name in SWEEP_PATHS:
        OmegaConf.register_new_resolver(name, lambda: "", replace=True)
    return _composed(overrides, _files(repr(register_plugins_with_hydra())))


def plain(configuration: DictConfig) -> Raw:
    """A configuration that Hydra composed, as plain values."""
    content = OmegaConf.to_container(configuration, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


class Files:
    """Configurations of the files that words choose: Hydra's defaults, with other files in their places.

    An experiment's file changes the whole configuration, every other fills the section of its name.
    """

    def __init__(self, read: ReadFiles) -> None:
        self.read = cache(read)

    def chosen(self, choices: Sequence[Override]) -> DictConfig:
        """A configuration of its own; raises what Hydra raises."""
        option_of = {each.key_or_group: str(each.value()) for each in choices}
        is_known = all(option in options(name) for name, option in option_of.items())
        if EXPERIMENT in option_of or len(option_of) < len(choices) or not is_known:
            return deepcopy(self.read(tuple(str(each.input_line) for each in choices)))
        together = deepcopy(self.read(()))
        for name, option in option_of.items():
            together[name] = read_option(name, option)
        return together


@cache
def _files(plugins: str) -> Files:  # noqa: ARG001  other packages are other options
    def read(words: tuple[str, ...]) -> DictConfig:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=[*words])

    return Files(read)


def _composed(words: Sequence[str], files: Files) -> Raw:
    """Words of any other kind, which Hydra refuses, it is given as they are."""
    overrides = OverridesParser.create().parse_overrides([*words])
    known = groups()
    values = [each for each in overrides if _sets_a_value(each, known)]
    choices = [each for each in overrides if _chooses_a_file(each, known)]
    if len(values) + len(choices) < len(overrides):
        return plain(files.read(tuple(words)))
    cell = files.chosen(choices)
    ConfigLoaderImpl._apply_overrides_to_config(values, cell)
    return plain(cell)


def _chooses_a_file(override: Override, known: Sequence[str]) -> bool:
    is_plain = _is_change(override) and not override.is_add()
    return is_plain and override.key_or_group in known and isinstance(override.value(), str)


def _sets_a_value(override: Override, known: Sequence[str]) -> bool:
    section = override.key_or_group.replace("/", ".").split(".")[0]
    return _is_change(override) and override.key_or_group not in known and section != "hydra"


def _is_change(override: Override) -> bool:
    is_one_value = not override.is_sweep_override() and override.package is None
    return is_one_value and not override.is_delete() and "/" not in override.key_or_group
