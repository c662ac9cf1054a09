"""Strategies by name: ours, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import entry_points

from bench.config import ConfigError
from bench.strategies.facts import Facts
from bench.strategies.plugin import Offer, in_one_line

ENTRY_POINTS = "ulysses_ring_bench.strategies"
OUR_PACKAGE = "ulysses-ring-bench"


class StrategyTable(Mapping[str, Facts]):
    """Ours in their own order, then the offered ones in that of their names.

    Names come from the installed packages' metadata; a package is imported when its facts are asked for, so
    a broken one fails nobody else. Asking for its facts, or by a name that is offered twice, raises
    ConfigError.
    """

    def __init__(self, ours: Iterable[Facts]) -> None:
        self.ours: Mapping[str, Facts] = {facts.name: facts for facts in ours}
        self._loaded: dict[str, Facts] = {}

    def __getitem__(self, name: str) -> Facts:
        offers = self._offers.get(name, ())
        if name in self.ours and not offers:
            return self.ours[name]
        if not offers:
            raise KeyError(name)
        self._refuse_two(name, offers)
        if name not in self._loaded:
            self._loaded[name] = offers[0].load()
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self._offers

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        yield from self.offered()

    def __len__(self) -> int:
        return len(self.ours) + len(self.offered())

    def offered(self) -> list[str]:
        """The names that only packages have, broken or not."""
        return [name for name in self._offers if name not in self.ours]

    def usable(self) -> list[Facts]:
        """The facts of all strategies that can be had; a broken one is left to whoever asks for it."""
        facts = []
        for name in self:
            try:
                facts.append(self[name])
            except ConfigError:
                continue
        return facts

    def packages(self, name: str) -> dict[str, str]:
        """The distribution that offers a strategy, and its version; empty for ours."""
        return {offer.package: offer.version for offer in self._offers.get(name, ())}

    @contextmanager
    def asking(self, name: str) -> Iterator[None]:
        """What a package's facts raise, as a ConfigError that says whose they are; ours raise as they do."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            if name in self.ours:
                raise
            raise self._offers[name][0].refusal(f"fails when asked: {in_one_line(error)}") from error

    @cached_property
    def _offers(self) -> Mapping[str, list[Offer]]:
        offers: dict[str, list[Offer]] = {}
        found = [Offer(entry) for entry in entry_points(group=ENTRY_POINTS)]
        for offer in sorted(found, key=lambda offer: (offer.name, offer.package)):
            offers.setdefault(offer.name, []).append(offer)
        return offers

    def _refuse_two(self, name: str, offers: list[Offer]) -> None:
        """Which of two was meant nobody can know, so neither runs."""
        packages = [*([OUR_PACKAGE] if name in self.ours else []), *(offer.package for offer in offers)]
        if len(packages) > 1:
            raise ConfigError(
                f"strategy={name}: the packages {' and '.join(packages)} both have a strategy of this name;"
                f" rename one's entry point, or: pip uninstall {packages[-1]}"
            )
