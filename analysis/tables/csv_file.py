"""summary.csv as a file; another process writes it where there is one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextvars import ContextVar
from pathlib import Path

import pandas as pd

from analysis.tables.csv_text import csv_pieces
from bench.store import write_pieces

FORKED_WITH: ContextVar[pd.DataFrame] = ContextVar("summary")
"""The summary that this process was forked with: to send one takes half as long as to write it."""


def forked_with(summary: pd.DataFrame) -> Executor:
    """One more process, which has this summary and all that is imported here without being sent any of it."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("fork"), FORKED_WITH.set, (summary,))


def csv_writer(summary: pd.DataFrame, path: Path, other: Executor | None = None) -> Callable[[], None]:
    """What writes the summary, and raises OSError, which names the file, where it cannot.

    An `other` process, forked with the same summary, begins at once; what is called waits for it.
    """
    begun = other.submit(_write_own, path) if other else None

    def write() -> None:
        if begun is None:
            write_pieces(path, csv_pieces(summary))
        else:
            begun.result()

    return write


def _write_own(path: Path) -> None:
    write_pieces(path, csv_pieces(FORKED_WITH.get()))
