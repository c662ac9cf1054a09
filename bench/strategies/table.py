"""Table of strategies by name: built-in ones, and plug-ins of installed packages with an entry point."""

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
LEGAL_NAMES: Mapping[str, Collection[str]] = {
    "layouts": LAYOUTS,
    "dtypes": DTYPE_BYTES,
    "kernels": KERNEL_FACTS,
}
"""Legal names of each attribute of a strategy's facts that is a tuple of names."""


class StrategyTable(Mapping[str, StrategyFacts]):
    """Facts of all strategies by name: built-in ones in their order, then plug-ins in alphabetical order.

    The names of plug-ins come from the metadata of installed packages. A package is imported only when its
    facts are read, so a broken package does not affect other strategies.
    """

    def __init__(self, built_in: Iterable[StrategyFacts]) -> None:
        self.built_in: Mapping[str, StrategyFacts] = {facts.name: facts for facts in built_in}
        self._loaded: dict[str, StrategyFacts] = {}

    def __getitem__(self, name: str) -> StrategyFacts:
        """Return the facts of a strategy; a plug-in is loaded once.

        Raises:
            KeyError: If no strategy has this name.
            ConfigError: If the plug-in cannot be loaded, or if two packages have a strategy of this name,
                since the user may mean either.
        """
        if name in self._loaded:
            return self._loaded[name]
        plugins = self._plugins.get(name, [])
        packages = [OUR_PACKAGE] * (name in self.built_in) + [plugin.package for plugin in plugins]
        if not packages:
            raise KeyError(name)
        if len(packages) > 1:
            raise ConfigError(
                f"strategy={name}: the packages {' and '.join(packages)} both have a strategy of this name;"
                f" rename one's entry point, or: pip uninstall {packages[-1]}"
            )
        self._loaded[name] = plugins[0].load() if plugins else self.built_in[name]
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._plugins

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self.plugin_names()

    def __len__(self) -> int:
        return len(self.built_in) + len(self.plugin_names())

    def plugin_names(self) -> list[str]:
        """Return the names of plug-ins that no built-in strategy has; some may be impossible to load."""
        return [name for name in self._plugins if name not in self.built_in]

    def usable(self) -> list[StrategyFacts]:
        """Return the facts of all strategies that can be loaded."""
        facts = []
        for name in self:
            with suppress(ConfigError):
                facts.append(self[name])
        return facts

    def packages(self, name: str) -> dict[str, str]:
        """Return {distribution: version} of the packages with a plug-in of this name, which may be none."""
        return {plugin.package: plugin.version for plugin in self._plugins.get(name, ())}

    @contextmanager
    def name_plugin_in_errors(self, name: str) -> Iterator[None]:
        """Turn an error inside the context into a ConfigError that names the plug-in's package.

        Errors of built-in strategies are left as they are.
        """
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if name in self.built_in:
                raise
            fault = f"fails when its facts are read: {error_in_one_line(error)}"
            raise self._plugins[name][0].refusal(fault) from error

    @cached_property
    def _plugins(self) -> Mapping[str, list[Plugin]]:
        plugins: dict[str, list[Plugin]] = {}
        for entry in entry_points(group=ENTRY_POINTS):
            assert entry.dist is not None  # true for entry points of installed packages
            plugin = Plugin(entry, entry.dist.name, entry.dist.version)
            plugins.setdefault(entry.name, []).append(plugin)
        return {name: sorted(plugins[name], key=lambda plugin: plugin.package) for name in sorted(plugins)}


@dataclass(frozen=True, slots=True)
class Plugin:
    """Entry point of a strategy: its name, the class of its facts, and the distribution that contains it."""

    entry: EntryPoint
    package: str
    version: str

    def load(self) -> StrategyFacts:
        """Return the strategy's facts.

        Raises:
            ConfigError: If the facts cannot be loaded or contradict themselves.
        """
        try:
            facts = self.entry.load()()
            fault = next(_faults(self.entry.name, facts), None)
        except Exception as error:
            raise self.refusal(f"cannot be loaded: {error_in_one_line(error)}") from error
        if fault is not None:
            raise self.refusal(fault)
        valid_facts: StrategyFacts = facts
        return valid_facts

    def refusal(self, fault: str) -> ConfigError:
        """Return an error that names the package, its fault and the command that removes it.

        Args:
            fault: End of a sentence whose subject is the class of the facts.
        """
        return ConfigError(
            f"strategy={self.entry.name}: {self.entry.value} of the package {self.package} {self.version}"
            f" {fault}; correct it, or remove the package: pip uninstall {self.package}"
        )


def error_in_one_line(error: BaseException) -> str:
    """Return type, first message line and origin of an error, as `ValueError: message (facts.py:12)`."""
    message = next(iter(str(error).strip().splitlines()), "")
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{origin}" if message else f"{type(error).__name__}{origin}"


def _faults(name: str, facts: Any) -> Iterator[str]:
    """Yield the faults of the object that the entry point `name` made, as `Plugin.refusal` takes them."""
    if not isinstance(facts, StrategyFacts):
        yield "is not a subclass of bench.StrategyFacts"
        return
    stated_name = getattr(facts, "name", None)
    if stated_name != name:
        yield f"has name = {stated_name!r}, but its entry point is named {name!r}"
    module = type(facts).__module__
    code = f"{module.removesuffix(FACTS_MODULE)}.attention"
    if not module.endswith(FACTS_MODULE):
        yield f"is defined in the module {module}; it must be in facts.py, inside a package"
    elif importlib.util.find_spec(code) is None:
        yield f"needs the module {code}, which does not exist"
    yield from _attribute_faults(facts)


def _attribute_faults(facts: StrategyFacts) -> Iterator[str]:
    """Yield the faults in the values of a strategy's attributes, as `Plugin.refusal` takes them."""
    for attribute, legal in LEGAL_NAMES.items():
        names: Any = getattr(facts, attribute)
        allows_all = names is None and attribute == "kernels"
        if not allows_all and not (_is_tuple_of_text(names) and set(names) <= set(legal)):
            yield f"has {attribute} = {names!r}; it must be a tuple of names from {', '.join(legal)}"
    if isinstance(facts.style, PlotStyle):
        yield from facts.style.faults()
    elif facts.style is not None:
        yield f"has style = {facts.style!r}; it must be a bench.PlotStyle or None"
    if not all(_is_option(key, value) for key, value in facts.options.items()):
        yield (
            f"has options = {facts.options!r}; each value must be a tuple of texts, a Flag or a WholeNumber,"
            " and no key may be `name`"
        )


def _is_option(key: Any, value: Any) -> bool:
    is_option_type = isinstance(value, Flag | WholeNumber) or _is_tuple_of_text(value)
    return is_option_type and key != "name" and str(key).isidentifier()


def _is_tuple_of_text(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, str) for item in value)
