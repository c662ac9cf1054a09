"""Strategies whose code is a package's, as it is shipped: what is said where the package is not as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.environment import installed
from bench.ranks.log import RefusedError
from bench.strategies.facts import Facts
from bench.strategies.table import in_one_line


@contextmanager
def parts_of_package(facts: Facts) -> Iterator[None]:
    """A context in which a package is imported and its parts are looked up, and nothing else is done.

    Raises RefusedError for whatever the package raises: a broken one, or one of another version, makes its
    own strategies `unsupported` and hurts no others.
    """
    try:
        yield
    except Exception as error:
        package = facts.package
        found = f"the package {package} {installed(package or '')}"
        raise RefusedError(
            f"strategy={facts.name}: {found} cannot be used: {in_one_line(error)}; install the version that"
            f" was tried: {facts.install}"
        ) from error
