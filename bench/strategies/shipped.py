"""Strategies and kernels whose code is a package's, as it is: what is said where it cannot be used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.kernels import KERNELS, Kernel
from bench.environment import installed
from bench.ranks.log import RefusedError
from bench.strategies.facts import Facts
from bench.strategies.table import in_one_line


@contextmanager
def usable(what: str, package: str | None, way_out: str) -> Iterator[None]:
    """A context in which a package is imported and its parts are looked up, and nothing else is done.

    Raises RefusedError for whatever the package raises: a broken one, one of another version or one built for
    another torch makes what needs it `unsupported` and hurts nothing else.
    """
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        found = f"the package {package} {installed(package or '')}"
        raise RefusedError(f"{what}: {found} cannot be used: {in_one_line(error)}; {way_out}") from error


def parts_of_package(facts: Facts) -> AbstractContextManager[None]:
    """The context for a strategy's own package."""
    way_out = f"install the version that was tried: {facts.install}"
    return usable(f"strategy={facts.name}", facts.package, way_out)


def usable_kernel(name: str) -> Kernel:
    """The kernel, once what it calls could be imported; raises RefusedError with reason and way out."""
    kernel, facts = KERNELS[name], KERNEL_FACTS[name]
    way_out = f"install it for this torch: {facts.install}; or take kernel={DEFAULT_KERNEL}"
    with usable(f"kernel={name}", facts.package, way_out):
        if kernel.module is not None:
            importlib.import_module(kernel.module)
    return kernel
