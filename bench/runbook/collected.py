"""How many tests pytest would run, for several command lines in one process of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from bench.config import ConfigError
from bench.environment import REPOSITORY


def collected(commands: Sequence[Sequence[str]]) -> list[int | str]:
    """Of each command line how many tests it would run, or why none."""
    done = subprocess.run(  # noqa: S603  our own module
        [sys.executable, "-m", "bench.runbook.collected", json.dumps([*map(list, commands)])],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(f"tests cannot be collected: {done.stderr.strip().splitlines()[-1]}")
    found: list[int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Collector:
    """A plugin of pytest that counts what is left after all are deselected that should be."""

    count = 0

    def pytest_collection_finish(self, session: object) -> None:
        self.count = len(getattr(session, "items", ()))


def _collect(words: Sequence[str]) -> int | str:
    import pytest

    collector, said = _Collector(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = pytest.main(["--collect-only", "-q", "-n", "0", *words], plugins=[collector])
    if code == pytest.ExitCode.OK and collector.count:
        return collector.count
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [str(code)])[-1]


if __name__ == "__main__":
    print(json.dumps([_collect(words) for words in json.loads(sys.argv[1])]))
