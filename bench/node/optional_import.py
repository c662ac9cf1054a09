"""Imports of packages that only some cells need, and that must not keep the others from running."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

SLOW_IMPORT_S = 60.0
"""Cells that do not need a package wait so long for it at the most."""


def try_to_import(module: str, within_s: float = SLOW_IMPORT_S) -> bool:
    """Import this in the process's main thread; whether it worked, in time.

    A package that does not work is as if never imported: a rank that needs it imports it again,
    and its record says what is wrong.
    """
    try:
        with _time_limit(within_s):
            importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001  a broken package may raise anything, SystemExit too
        package = module.partition(".")[0]
        for name in [*sys.modules]:
            if name.partition(".")[0] == package:
                del sys.modules[name]
        if isinstance(error, _SlowImportError):
            print(
                f"{package}: took over {within_s:.0f} s to import; each rank that needs it imports it again",
                file=sys.stderr,
            )
        return False
    return True


class _SlowImportError(BaseException):
    """No package may catch it by accident."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(*_: object) -> NoReturn:
        raise _SlowImportError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
