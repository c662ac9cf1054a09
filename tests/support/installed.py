"""Packages that are installed while tests run."""

from bench.common.environment import installed
from bench.strategies import STRATEGIES

INSTALLED = [name for name, facts in STRATEGIES.items() if facts.package is None or installed(facts.package)]
"""Strategies that can run here: some are optional, and their packages seldom there."""


def see_what_is_installed_now(monkeypatch):
    """A process reads once which packages have strategies, and their facts; undone, it knows what it knew."""
    len(STRATEGIES)  # reads it, for there to be something to undo
    monkeypatch.delitem(vars(STRATEGIES), "_plugins")
    monkeypatch.setattr(STRATEGIES, "_loaded", {**STRATEGIES._loaded})
