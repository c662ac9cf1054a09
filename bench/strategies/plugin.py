"""A strategy that an installed package offers by a Python entry point, checked as it is loaded."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from bench.attention.kernel_facts import KERNEL_FACTS
from bench.attention.layouts import LAYOUTS
from bench.config import DTYPE_BYTES, ConfigError
from bench.strategies.facts import Facts

FACTS_MODULE = ".facts"
KNOWN: Mapping[str, Collection[str]] = {
    "layouts": LAYOUTS,
    "dtypes": DTYPE_BYTES,
    "kernels": KERNEL_FACTS,
}
"""What the names in a strategy's own tables can be."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One entry point: the strategy's name, and the class that states its facts."""

    entry: EntryPoint

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def package(self) -> str:
        """The distribution that brings it."""
        return self.entry.dist.name if self.entry.dist is not None else self.entry.module

    @property
    def version(self) -> str:
        return self.entry.dist.version if self.entry.dist is not None else "?"

    def load(self) -> Facts:
        """The strategy's facts; raises ConfigError where they cannot be had or do not hold together."""
        try:
            made = self.entry.load()
        except Exception as error:
            raise self.refusal(f"cannot be imported: {in_one_line(error)}") from error
        if not (isinstance(made, type) and issubclass(made, Facts)):
            raise self.refusal("is no subclass of bench.strategies.facts.Facts")
        try:
            facts: Facts = made()
        except Exception as error:
            raise self.refusal(f"cannot be made: {in_one_line(error)}") from error
        for check in CHECKS:
            fault = check(self, facts)
            if fault is not None:
                raise self.refusal(fault)
        return facts

    def refusal(self, fault: str) -> ConfigError:
        """The error that names the package, what is wrong with it, and how to go on without it."""
        return ConfigError(
            f"strategy={self.name}: {self.entry.value} of the package {self.package} {self.version} {fault};"
            f" correct it, or go on without it: pip uninstall {self.package}"
        )


def in_one_line(error: BaseException) -> str:
    """`ValueError: what it says (facts.py:12)`: the last place that the error came by."""
    text = next(iter(str(error).strip().splitlines()), "")
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _misnamed(offer: Offer, facts: Facts) -> str | None:
    if not offer.name.isidentifier():
        return "has a name that cannot be typed; take letters, digits and underscores, as in gather_kv"
    name = getattr(facts, "name", None)
    return None if name == offer.name else f"says name = {name!r}, not {offer.name!r} as its entry point does"


def _misplaced(_: Offer, facts: Facts) -> str | None:
    module = type(facts).__module__
    if not module.endswith(FACTS_MODULE):
        return f"is defined in the module {module}; a strategy's facts stand in facts.py, inside a package"
    code = f"{module.removesuffix(FACTS_MODULE)}.attention"
    return None if importlib.util.find_spec(code) is not None else f"has no {code} beside it"


def _unknown_names(_: Offer, facts: Facts) -> str | None:
    for table, known in KNOWN.items():
        names: Any = getattr(facts, table)
        if names is None and table == "kernels":
            continue
        if not _is_choice(names) or not set(names) <= set(known):
            return f"says {table} = {names!r}; it has to be a tuple of names from {', '.join(known)}"
    return None


def _odd_options(_: Offer, facts: Facts) -> str | None:
    options: Any = facts.options
    if not isinstance(options, Mapping) or not all(map(_is_choice, options.values())):
        return f"says options = {options!r}; it has to map every key to a tuple of words, the default first"
    odd = [key for key in options if key == "name" or not str(key).isidentifier()]
    return f"has an option {odd[0]!r}, which cannot be typed; take another word" if odd else None


def _is_choice(names: Any) -> bool:
    return isinstance(names, tuple) and bool(names) and all(isinstance(name, str) for name in names)


CHECKS: Sequence[Callable[[Offer, Facts], str | None]] = (_misnamed, _misplaced, _unknown_names, _odd_options)
