"""The right to measure on a machine's devices, held by one sweep at a time, until its process ends.

A file a device, locked by the kernel: however its holder dies, the lock goes with it. A GPU's sweep holds its
GPUs, a CPU's sweep the machine.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bench.common.labels import shown
from bench.common.nvml import visible_uuids
from bench.config import Cell, ConfigError, WhenTaken

VARIABLE = "ULYSSES_RING_BENCH_LEASES"
"""The environment's variable that names another folder, such as one that several containers see."""
FOLDER = Path("/tmp/ulysses-ring-bench-leases")  # noqa: S108  every user's sweeps must meet; TMPDIR may be one's own
MACHINE = "machine"
"""The lease of a CPU's sweep."""
POLL_S = 0.25
MOST_CHARACTERS = 500
"""Of a holder's own words, which anybody may have written."""


@contextmanager
def lease(
    gpus: Sequence[str], when_taken: WhenTaken, say: Callable[[str], None], *, folder: Path = Path()
) -> Iterator[None]:
    """Hold these devices: `gpus` are UUIDs, none stands for the machine; `folder` is told to those who wait.

    Entering waits, says so once, and can be interrupted; with REFUSE it raises ConfigError instead. Where no
    lease can be taken at all, as in a read-only /tmp, a line says so and the context is entered.
    """
    words = f"{shown(shlex.join(sys.argv))} (pid {os.getpid()}, folder {shown(str(folder.absolute()))})"
    with ExitStack() as held:
        try:
            for path in [] if when_taken is WhenTaken.NONE else _paths(gpus):
                _lock(path, when_taken, say, held)
                # A new file, and so no link of another user's is followed.
                path.unlink(missing_ok=True)
                with path.open("x") as file:
                    file.write(words)
                held.callback(path.unlink, missing_ok=True)
        except OSError as error:
            why = f"{error.filename or leases_folder()}: {error.strerror or error}"
            say(f"no lease of this machine ({why}): another sweep would not be seen")
        yield


def _lock(path: Path, when_taken: WhenTaken, say: Callable[[str], None], held: ExitStack) -> None:
    """Lock the device whose holder writes into this file."""
    lock = FileLock(path.with_suffix(".lock"), mode=0o666)
    try:
        held.enter_context(lock.acquire(blocking=False))
    except Timeout:
        device = "this machine" if path.stem == MACHINE else f"GPU {path.stem}"
        if when_taken is WhenTaken.REFUSE:
            raise ConfigError(
                f"lease=refuse: {device} is in use by {_holder(path)}; wait for it, or add lease=none"
            ) from None
        say(f"waiting for {device}, in use by {_holder(path)}; lease=none runs beside it")
        held.enter_context(lock.acquire(poll_interval=POLL_S))


def gpus_of(cells: Collection[Cell]) -> Sequence[str]:
    """The UUIDs of the GPUs that these cells use here; none where one uses the CPU, or they are unknown."""
    if any(cell.cluster.device != "cuda" for cell in cells):
        return ()
    uuids = visible_uuids()
    used = {cell.cluster.device_index(rank) for cell in cells for rank in range(len(cell.running_ranks))}
    return [uuids[index] for index in sorted(used) if index < len(uuids)]


def leases_folder() -> Path:
    """Where this machine's leases are: VARIABLE's folder, or FOLDER."""
    return Path(os.environ.get(VARIABLE) or FOLDER)


def _paths(gpus: Sequence[str]) -> list[Path]:
    """The files of these devices, in one order for all: two that wait do not wait for each other."""
    folder = leases_folder()
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o777)  # for all users; filelock takes no other user's file where the sticky bit is set
    return [folder / f"{name}.txt" for name in sorted(gpus) or [MACHINE]]


def _holder(path: Path) -> str:
    """Who holds a device, in one line and in their own words."""
    try:
        words = path.read_text(errors="replace")[:MOST_CHARACTERS]
    except OSError:
        words = ""
    return "".join(filter(str.isprintable, words)) or "somebody who has not said who"
