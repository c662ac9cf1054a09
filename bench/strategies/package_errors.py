"""Refusals of strategies and kernels whose package cannot be imported or has an unsupported version."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from bench.attention.kernel_facts import DEFAULT_KERNEL, KERNEL_FACTS
from bench.attention.kernels import KERNELS, Kernel
from bench.common.environment import installed_version
from bench.ranks.log import RefusedError
from bench.strategies.facts import StrategyFacts
from bench.strategies.table import error_in_one_line


@contextmanager
def refuse_package_errors(facts: StrategyFacts) -> Iterator[None]:
    """Turn any error inside the context into a RefusedError that names the strategy's package.

    Only import the package and look up its attributes inside the context, so that errors of our code are not
    hidden. A broken package, or one of an untested version, makes only its strategies' cells `unsupported`.

    Raises:
        RefusedError: With the error, the package's version and the command that installs the tested one.
    """
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        way_out = f"install the tested version: {facts.install_command}"
        raise _package_refusal(f"strategy={facts.name}", facts.package, error, way_out) from error


def import_kernel(name: str) -> Kernel:
    """Return a kernel after importing the module that it calls.

    Raises:
        RefusedError: If the import fails, as for a wheel that was built for another torch.
    """
    kernel, facts = KERNELS[name], KERNEL_FACTS[name]
    if kernel.module is not None:
        try:
            importlib.import_module(kernel.module)
        except Exception as error:
            way_out = f"install it for this torch: {facts.install}; or take kernel={DEFAULT_KERNEL}"
            raise _package_refusal(f"kernel={name}", facts.package, error, way_out) from error
    return kernel


def _package_refusal(choice: str, package: str | None, error: Exception, way_out: str) -> RefusedError:
    version = installed_version(package or "")
    return RefusedError(
        f"{choice}: the package {package} {version} cannot be used: {error_in_one_line(error)}; {way_out}"
    )
