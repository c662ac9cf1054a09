"""Refusals of strategies and kernels whose package cannot be imported or is of another version."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.kernels import KERNELS, Kernel
from bench.common.environment import installed
from bench.ranks.log import RefusedError
from bench.strategies.facts import StrategyFacts
from bench.strategies.table import in_one_line


@contextmanager
def parts_of_package(facts: StrategyFacts) -> Iterator[None]:
    """A context in which a package is imported and its parts are looked up, and nothing else is done.

    Raises RefusedError for whatever the package raises: a broken one, or one of another version, makes its
    own strategies `unsupported` and hurts no others.
    """
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        way_out = f"install the version that was tried: {facts.install}"
        raise _refused(f"strategy={facts.name}", facts.package, error, way_out) from error


def usable_kernel(name: str) -> Kernel:
    """The kernel, once what it calls could be imported: a wheel that was built for another torch cannot.

    Raises RefusedError with the reason and the way out.
    """
    kernel, facts = KERNELS[name], KERNEL_FACTS[name]
    if kernel.module is not None:
        try:
            importlib.import_module(kernel.module)
        except Exception as error:
            way_out = f"install it for this torch: {facts.install}; or take kernel={DEFAULT_KERNEL}"
            raise _refused(f"kernel={name}", facts.package, error, way_out) from error
    return kernel


def _refused(what: str, package: str | None, error: Exception, way_out: str) -> RefusedError:
    found = f"the package {package} {installed(package or '')}"
    return RefusedError(f"{what}: {found} cannot be used: {in_one_line(error)}; {way_out}")
