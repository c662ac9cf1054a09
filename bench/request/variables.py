"""Variables of the environment in the user's words, `${oc.env:NAME}`: what they say is stored with a cell."""

from __future__ import annotations

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from bench.config import ConfigError

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
"""Parts of names of variables whose values no record should hold."""


def refuse_secret_variables() -> None:
    """From now on `${oc.env:NAME}` is an error where NAME may be a secret; others are as OmegaConf has it."""
    OmegaConf.register_new_resolver("oc.env", _value_of, replace=True)


def _value_of(name: str, *default: str | None) -> str | None:
    if any(word in name.upper() for word in SECRET_WORDS):
        raise ConfigError(f"{name} may be a secret, and records would hold it")
    return oc.env(name, *default)
