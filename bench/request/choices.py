"""Choices and their options: a folder of conf/ for each choice, with a YAML file for each option.

A strategy of an installed package has no such file; its content comes from the strategy's facts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from bench.common.environment import REPOSITORY
from bench.config import ConfigError
from bench.request import values
from bench.request.layer_types import MODELS_WITH_EXPERTS, experts_error
from bench.strategies import STRATEGIES
from bench.strategies.facts import StrategyFacts
from bench.strategies.options import yaml_default

CONF = REPOSITORY / "conf"
WITHOUT_FILE: Mapping[str, str] = {
    "a800": "a100_80gb is nearest, but A800 has 400 instead of 600 GB/s of NVLink",
    "h800": "h100_80gb is nearest, but H800 has 400 instead of 900 GB/s of NVLink",
    "h20": "h100_80gb has its NVLink, but H20 has 148 instead of 989 TFLOP/s, and 96 GB at 4.0 TB/s",
    "b300": "b200 is nearest, but B300 has 288 instead of 180 GB",
    "gb300": "b200 is nearest, but GB300 has 288 instead of 180 GB, and NVLink between 72 GPUs",
    "gb200": "b200 is nearest, but GB200 has NVLink between 72 GPUs",
}
"""Nearest file and the difference to it, by the name of a GPU that has no file in conf/hardware/."""

Raw = Mapping[str, Any]
"""A composed configuration as plain values, before they are checked and converted."""


def refuse_no_conf() -> None:
    """Raise ConfigError if the code was copied without conf/."""
    if not CONF.is_dir():
        raise ConfigError(f"{CONF}: no such folder; install the whole checkout: pip install -e .")


def groups() -> list[str]:
    """Return the names of all choices: `strategy`, `model`, ..."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def options(group: str) -> list[str]:
    """Return the names of all options of a choice."""
    plugins = STRATEGIES.plugin_names() if group == "strategy" else []
    return sorted([*(path.stem for path in (CONF / group).glob("*.yaml")), *plugins])


def check_option(group: str, value: Any) -> str:
    """Return `value` if it is an option of this choice; raise ConfigError otherwise."""
    if group == "model" and value in MODELS_WITH_EXPERTS:
        raise experts_error(f"model={value}", "this model")
    if group == "hardware" and value not in options(group):
        _refuse_known_hardware(str(value))
    return values.choice(group, value, options(group))


def _refuse_known_hardware(name: str) -> None:
    """Raise ConfigError with an answer for a GPU of WITHOUT_FILE and for AMD's GPUs."""
    gpu = re.split("[-_ ]", name.lower())[0]
    if re.fullmatch(r"mi\d{3}[ax]?", gpu):
        raise ConfigError(f"hardware={name}: AMD's GPUs are not supported; name an NVIDIA GPU of --help-all")
    if gpu in WITHOUT_FILE:
        raise ConfigError(
            f"hardware={name}: has no file in conf/hardware/; {WITHOUT_FILE[gpu]}; copy that file and correct"
            " the numbers (docs/hardware.md)"
        )


def read_option(group: str, name: str) -> Raw:
    """Return the content of an option's file; raise ConfigError for a plugin that cannot be loaded."""
    if group == "strategy" and name in STRATEGIES.plugin_names():
        return strategy_content(STRATEGIES[name])
    return deepcopy(_read_yaml(CONF / group / f"{name}.yaml"))


@cache
def _read_yaml(file: Path) -> Raw:
    """Return the content of a YAML file, which is cached because every cell of a plan reads it."""
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def default_strategies() -> list[str]:
    """Return the strategies that a sweep runs if the user names none."""
    params = OmegaConf.load(CONF / "config.yaml").hydra.sweeper.params
    return str(params.strategy).split(",")


def register_plugins_with_hydra() -> None:
    """Make the strategies of installed packages (plugins) options in Hydra.

    A plugin that cannot be loaded is an option too, so that `resolve` refuses it with the reason.
    """
    usable = {facts.name: strategy_content(facts) for facts in STRATEGIES.usable()}
    for name in STRATEGIES.plugin_names():
        ConfigStore.instance().store(group="strategy", name=name, node=usable.get(name, {"name": name}))


def strategy_content(facts: StrategyFacts) -> dict[str, Any]:
    """Return what a strategy's file in conf/ would contain: its name and the default of each option."""
    return {"name": facts.name, **{key: yaml_default(option) for key, option in facts.options.items()}}
