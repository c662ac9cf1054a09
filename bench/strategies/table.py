"""Strategies by name: ours, and plugins, which installed packages bring by their Python entry points."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES, ConfigError
from bench.strategies.facts import StrategyFacts
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.plot_style import PlotStyle

ENTRY_POINTS = "ulysses_ring_bench.strategies"
OUR_PACKAGE = "ulysses-ring-bench"
FACTS_MODULE = ".facts"
KNOWN_NAMES: Mapping[str, Collection[str]] = {
    "layouts": LAYOUTS,
    "dtypes": DTYPE_BYTES,
    "kernels": KERNEL_FACTS,
}
"""Attributes of a strategy's facts that are tuples of names, and the names there are."""


class StrategyTable(Mapping[str, StrategyFacts]):
    """Ours in their own order, then plugins by name.

    Names come from the installed packages' metadata. A package is imported when its facts are read, so a
    broken one fails nobody else: reading its facts raises ConfigError, as for a name that two packages have.
    """

    def __init__(self, ours: Iterable[StrategyFacts]) -> None:
        self.ours: Mapping[str, StrategyFacts] = {facts.name: facts for facts in ours}
        self._loaded: dict[str, StrategyFacts] = {}

    def __getitem__(self, name: str) -> StrategyFacts:
        """Return the facts, read once; of two strategies of one name neither runs, as either may be meant."""
        if name in self._loaded:
            return self._loaded[name]
        plugins = self._plugins.get(name, [])
        packages = [OUR_PACKAGE] * (name in self.ours) + [plugin.package for plugin in plugins]
        if not packages:
            raise KeyError(name)
        if len(packages) > 1:
            raise ConfigError(
                f"strategy={name}: the packages {' and '.join(packages)} both have a strategy of this name;"
                f" rename one's entry point, or: pip uninstall {packages[-1]}"
            )
        self._loaded[name] = plugins[0].load() if plugins else self.ours[name]
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        yield from self.plugin_names()

    def __len__(self) -> int:
        return len(self.ours) + len(self.plugin_names())

    def plugin_names(self) -> list[str]:
        """The names that only packages have, broken or not."""
        return [name for name in self._plugins if name not in self.ours]

    def usable(self) -> list[StrategyFacts]:
        """The facts of all strategies that can be loaded."""
        facts = []
        for name in self:
            with suppress(ConfigError):
                facts.append(self[name])
        return facts

    def packages(self, name: str) -> dict[str, str]:
        """The distribution that brings a strategy, and its version; empty for ours."""
        return {plugin.package: plugin.version for plugin in self._plugins.get(name, ())}

    @contextmanager
    def plugin_errors_named(self, name: str) -> Iterator[None]:
        """What a plugin's facts raise becomes a ConfigError that names its package; ours raise as they do."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if name in self.ours:
                raise
            fault = f"fails when its facts are read: {in_one_line(error)}"
            raise self._plugins[name][0].refusal(fault) from error

    @cached_property
    def _plugins(self) -> Mapping[str, list[Plugin]]:
        plugins: dict[str, list[Plugin]] = {}
        for entry in entry_points(group=ENTRY_POINTS):
            assert entry.dist is not None  # so for every entry point of an installed package
            plugin = Plugin(entry, entry.dist.name, entry.dist.version)
            plugins.setdefault(entry.name, []).append(plugin)
        return {name: sorted(plugins[name], key=lambda plugin: plugin.package) for name in sorted(plugins)}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point: the strategy's name, the class that states its facts, the distribution it is of."""

    entry: EntryPoint
    package: str
    version: str

    def load(self) -> StrategyFacts:
        """The strategy's facts; raises ConfigError where they cannot be loaded or contradict themselves."""
        try:
            facts = self.entry.load()()
            fault = next(_faults(self.entry.name, facts), None)
        except Exception as error:
            raise self.refusal(f"cannot be loaded: {in_one_line(error)}") from error
        if fault is not None:
            raise self.refusal(fault)
        known: StrategyFacts = facts
        return known

    def refusal(self, fault: str) -> ConfigError:
        """An error that names the package, what is wrong with it, and how to go on without it."""
        return ConfigError(
            f"strategy={self.entry.name}: {self.entry.value} of the package {self.package} {self.version}"
            f" {fault}; correct it, or go on without it: pip uninstall {self.package}"
        )


def in_one_line(error: BaseException) -> str:
    """`ValueError: message (facts.py:12)`, with the line that raised it."""
    message = next(iter(str(error).strip().splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}" if message else f"{type(error).__name__}{where}"


def _faults(name: str, facts: Any) -> Iterator[str]:
    """Yield the faults of a strategy's name, place and attributes; each follows `<class> of <package>`."""
    if not isinstance(facts, StrategyFacts):
        yield "is not a subclass of bench.StrategyFacts"
        return
    own_name = getattr(facts, "name", None)
    if own_name != name:
        yield f"has name = {own_name!r}, but its entry point is named {name!r}"
    module = type(facts).__module__
    code = f"{module.removesuffix(FACTS_MODULE)}.attention"
    if not module.endswith(FACTS_MODULE):
        yield f"is defined in the module {module}; a strategy's facts stand in facts.py, inside a package"
    elif importlib.util.find_spec(code) is None:
        yield f"has no {code} beside it"
    yield from _attribute_faults(facts)


def _attribute_faults(facts: StrategyFacts) -> Iterator[str]:
    """Yield the faults in the values of a strategy's attributes."""
    for attribute, known in KNOWN_NAMES.items():
        names: Any = getattr(facts, attribute)
        is_any = names is None and attribute == "kernels"
        if not is_any and not (_is_tuple_of_text(names) and set(names) <= set(known)):
            yield f"has {attribute} = {names!r}; it has to be a tuple of names from {', '.join(known)}"
    if isinstance(facts.style, PlotStyle):
        yield from facts.style.faults()
    elif facts.style is not None:
        yield f"has style = {facts.style!r}; it has to be a bench.PlotStyle, or None"
    if not all(_is_option(key, value) for key, value in facts.options.items()):
        yield (
            f"has options = {facts.options!r}; each key but `name` has to have a tuple of texts, a Flag or"
            " a WholeNumber"
        )


def _is_option(key: Any, value: Any) -> bool:
    has_choices = isinstance(value, Flag | WholeNumber) or _is_tuple_of_text(value)
    return has_choices and key != "name" and str(key).isidentifier()


def _is_tuple_of_text(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, str) for each in value)
