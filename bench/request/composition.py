"""What Hydra composes of words: files that several cells choose are read once, values put in by cell.

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

from bench.request.choices import CONF, Raw, groups, register_plugins_with_hydra
from bench.request.variables import refuse_secret_variables

SWEEP_PATHS = ("new_sweep_dir", "hydra_dir")
"""Resolvers of conf/config.yaml that only a sweep can fill in."""

ReadFiles = Callable[[tuple[str, ...]], DictConfig]
"""A configuration of the files that these words choose."""


def composed_cells(cells: Sequence[Sequence[str]], read_files: ReadFiles) -> Iterator[Raw]:
    """What each cell's words compose to, without Hydra's own part, which `read_files` has."""

    @cache
    def read_once(words: tuple[str, ...]) -> DictConfig:
        configuration = read_files(words)
        with open_dict(configuration):
            del configuration["hydra"]
        return configuration

    return (_composed(words, read_once) for words in cells)


def composed(*overrides: str) -> Raw:
    """What the command line would compose of these words, for a cell that belongs to no sweep."""
    refuse_secret_variables()
    for name in SWEEP_PATHS:
        OmegaConf.register_new_resolver(name, lambda: "", replace=True)
    plugins = repr(register_plugins_with_hydra())
    return _composed(overrides, lambda words: _read(words, plugins))


def plain(configuration: DictConfig) -> Raw:
    """A configuration that Hydra composed, as plain values."""
    content = OmegaConf.to_container(configuration, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


@cache
def _read(words: tuple[str, ...], plugins: str) -> DictConfig:  # noqa: ARG001  others are another option
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*words])


def _composed(words: Sequence[str], read_files: ReadFiles) -> Raw:
    """Words of any other kind, which Hydra refuses, it is given as they are."""
    overrides = OverridesParser.create().parse_overrides([*words])
    known = groups()
    values = [each for each in overrides if _sets_a_value(each, known)]
    files = [each for each in overrides if _chooses_a_file(each, known)]
    if len(values) + len(files) < len(overrides):
        return plain(read_files(tuple(words)))
    cell = deepcopy(read_files(tuple(str(each.input_line) for each in files)))
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
