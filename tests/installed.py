"""Packages that are installed while tests run."""

from bench.strategies import STRATEGIES


def see_what_is_installed_now(monkeypatch):
    """A process reads once which packages have strategies, and their facts; undone, it knows what it knew."""
    len(STRATEGIES)  # reads it, for there to be something to undo
    monkeypatch.delitem(vars(STRATEGIES), "_plugins")
    monkeypatch.setattr(STRATEGIES, "_loaded", {**STRATEGIES._loaded})
