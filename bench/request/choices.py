"""The YAML files of conf/, one folder a choice and one file an option.

A strategy of an installed package has no file there: its option is made from its facts.
"""

from __future__ import annotations

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
from bench.request.layer_types import MODELS_WITH_EXPERTS, experts_refused
from bench.strategies import STRATEGIES
from bench.strategies.facts import StrategyFacts
from bench.strategies.options import in_yaml

CONF = REPOSITORY / "conf"

Raw = Mapping[str, Any]
"""A composed configuration as plain values, still in the user's words."""


def refuse_no_conf() -> None:
    """Raises ConfigError where the code was copied without conf/."""
    if not CONF.is_dir():
        raise ConfigError(f"{CONF}: no such folder; install the whole checkout: pip install -e .")


def groups() -> list[str]:
    """All choices: `strategy`, `model`, ..."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def options(group: str) -> list[str]:
    """All options of a choice."""
    plugins = STRATEGIES.plugin_names() if group == "strategy" else []
    return sorted([*(path.stem for path in (CONF / group).glob("*.yaml")), *plugins])


def option(group: str, value: Any) -> str:
    """One option of a choice, spelt exactly so; raises ConfigError for any other."""
    if group == "model" and value in MODELS_WITH_EXPERTS:
        raise experts_refused(f"model={value}", "this model")
    return values.choice(group, value, options(group))


def read_option(group: str, name: str) -> Raw:
    """The content of one option's file; raises ConfigError for a plugin that cannot be loaded."""
    if group == "strategy" and name in STRATEGIES.plugin_names():
        return option_of(STRATEGIES[name])
    return deepcopy(_content(CONF / group / f"{name}.yaml"))


@cache
def _content(file: Path) -> Raw:
    """Read once a process: a plan asks for the same few files cell by cell."""
    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def default_strategies() -> list[str]:
    """What a sweep compares that names no strategy."""
    params = OmegaConf.load(CONF / "config.yaml").hydra.sweeper.params
    return str(params.strategy).split(",")


def register_plugins_with_hydra() -> None:
    """Make every plugin an option of Hydra's; a broken one too, which `resolve` then refuses."""
    usable = {facts.name: option_of(facts) for facts in STRATEGIES.usable()}
    for name in STRATEGIES.plugin_names():
        ConfigStore.instance().store(group="strategy", name=name, node=usable.get(name, {"name": name}))


def option_of(facts: StrategyFacts) -> dict[str, Any]:
    """What a strategy's file would hold: its name, and the default of each of its own choices."""
    return {"name": facts.name, **{key: in_yaml(own) for key, own in facts.options.items()}}
