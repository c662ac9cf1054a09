"""Leases: only one sweep at a time measures on a device.

Every device has a lock file. Linux releases the lock when the sweep's process ends, also if it is killed.
A sweep on GPUs leases its GPUs, a sweep on the CPU leases the machine.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bench.common.labels import value_label
from bench.common.nvml import visible_uuids
from bench.config import Cell, ConfigError, LeasePolicy

VARIABLE = "ULYSSES_RING_BENCH_LEASES"
"""Environment variable that names another folder for leases, such as one that several containers share."""
FOLDER = Path("/tmp/ulysses-ring-bench-leases")  # noqa: S108  one folder for all users; TMPDIR may differ between them
MACHINE = "machine"
"""Name of the lease that a sweep on the CPU takes."""
POLL_S = 0.25
"""Seconds between two tries to lock a device that another sweep uses."""
MAX_HOLDER_CHARACTERS = 500
"""Length to which the description of a lease's holder is cut: any user may have written the file."""


@contextmanager
def lease(
    gpus: Sequence[str], when_taken: LeasePolicy, say: Callable[[str], None], *, folder: Path = Path()
) -> Iterator[None]:
    """Lease devices while the context is open.

    If a device is in use, entering the context prints one line and waits; Ctrl-C ends the wait. If no lease
    can be taken at all, for example in a read-only /tmp, a line says so and the context is entered anyway.

    Args:
        gpus: UUIDs of the GPUs; empty for the whole machine.
        when_taken: Wait for a device that is in use, refuse, or take no lease.
        say: Prints a line.
        folder: Folder of this sweep, which is shown to users of other sweeps that wait.

    Raises:
        ConfigError: A device is in use and `when_taken` is REFUSE.
    """
    command, place = value_label(shlex.join(sys.argv)), value_label(str(folder.absolute()))
    holder = f"{command} (pid {os.getpid()}, folder {place})"
    with ExitStack() as locks:
        try:
            for path in [] if when_taken is LeasePolicy.NONE else _paths(gpus):
                _lock(path, when_taken, say, locks)
                # Creating the file anew makes sure that no link of another user is followed.
                path.unlink(missing_ok=True)
                with path.open("x") as file:
                    file.write(holder)
                locks.callback(path.unlink, missing_ok=True)
        except OSError as error:
            reason = f"{error.filename or leases_folder()}: {error.strerror or error}"
            say(f"cannot lock this machine ({reason}); a second sweep on it would go unnoticed")
        yield


def _lock(path: Path, when_taken: LeasePolicy, say: Callable[[str], None], locks: ExitStack) -> None:
    """Lock a device; wait for another sweep that uses it, or refuse with ConfigError.

    `path` is the file in which the sweep that has leased the device describes itself.
    """
    lock = FileLock(path.with_suffix(".lock"), mode=0o666)
    try:
        locks.enter_context(lock.acquire(blocking=False))
    except Timeout:
        device = "this machine" if path.stem == MACHINE else f"GPU {path.stem}"
        if when_taken is LeasePolicy.REFUSE:
            raise ConfigError(
                f"lease=refuse: {device} is in use by {_holder(path)}; wait until it ends, or run at the same"
                " time with lease=none"
            ) from None
        say(
            f"waiting for {device}, which is in use by {_holder(path)}; lease=none would run at the same time"
        )
        locks.enter_context(lock.acquire(poll_interval=POLL_S))


def gpus_of(cells: Collection[Cell]) -> Sequence[str]:
    """Return the UUIDs of the GPUs that these cells use on this machine.

    The result is empty, which stands for the whole machine, if a cell uses the CPU or UUIDs are not known.
    """
    if any(cell.cluster.device != "cuda" for cell in cells):
        return ()
    uuids = visible_uuids()
    used = {cell.cluster.device_index(rank) for cell in cells for rank in range(len(cell.running_ranks))}
    return [uuids[index] for index in sorted(used) if index < len(uuids)]


def leases_folder() -> Path:
    """Return the folder of this machine's leases."""
    return Path(os.environ.get(VARIABLE) or FOLDER)


def _paths(gpus: Sequence[str]) -> list[Path]:
    """Return the lease files of these devices in the order in which every sweep locks them.

    With one order for all, two sweeps never wait for each other.
    """
    folder = leases_folder()
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(
            0o777
        )  # for all users, without the sticky bit: filelock could not take another user's file
    return [folder / f"{name}.txt" for name in sorted(gpus) or [MACHINE]]


def _holder(path: Path) -> str:
    """Return one line that describes the sweep that has leased a device."""
    try:
        text = path.read_text(errors="replace")[:MAX_HOLDER_CHARACTERS]
    except OSError:
        text = ""
    return "".join(filter(str.isprintable, text)) or "an unknown process"
