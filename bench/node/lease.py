"""The right to measure on a machine's devices, held by one sweep at a time, until its process ends.

A file a device, locked by the kernel (flock): however its holder dies, the lock goes with it. A GPU's sweep
holds its GPUs and shares the machine with others of other GPUs; a CPU's sweep holds the machine alone.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import getpass
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from bench.config import LEASES, ConfigError, RunConfig, WhenTaken
from bench.labels import shown
from bench.nvml import visible_uuids

VARIABLE = "ULYSSES_RING_BENCH_LEASES"
"""The environment's variable that names another folder, such as one that several containers see."""
FOLDER = Path("/tmp/ulysses-ring-bench-leases")  # noqa: S108  every user's sweeps must meet; TMPDIR may be one's own
MACHINE = "machine"
"""The lease that a CPU's sweep holds alone and those of GPUs share."""
POLL_S = 0.25
MOST_BYTES = 8192
"""Of a holder's own words, which anybody may have written."""
MOST_WORDS = 1000
"""Characters of a command that are kept."""
OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""No child inherits the lock, and no link leads elsewhere."""
TAKEN = frozenset({errno.EWOULDBLOCK, errno.EACCES})


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease, by what they wrote into its file."""

    pid: int
    user: str
    words: str
    folder: str
    since: str

    @property
    def line(self) -> str:
        """`python run_sweep.py -m ... (pid 7, user ada, folder out, since 2026-05-04 10:11:12)`."""
        user, words, folder, since = map(shown, (self.user, self.words, self.folder, self.since))
        return f"{words} (pid {self.pid}, user {user}, folder {folder}, since {since})"


class Lease:
    """A context in which this process holds these devices; `gpus` are UUIDs, and none stands for the machine.

    Entering waits, says so once a holder, and can be interrupted; with REFUSE it raises ConfigError instead.
    Where no lease can be taken at all, as in a read-only /tmp, a line says so and the context is entered.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        when_taken: WhenTaken,
        say: Callable[[str], None],
        *,
        folder: Path = Path(),
    ) -> None:
        """`folder` is told to those who wait."""
        self._modes = _modes(gpus)
        self._when_taken = when_taken
        self._say = say
        self._folder = folder
        self._files: list[int] = []

    def __enter__(self) -> Self:
        if self._when_taken is WhenTaken.NONE:
            return self
        try:
            self._take()
        except OSError as error:
            why = f"{error.filename or leases_folder()}: {error.strerror or error}"
            self._say(f"no lease of this machine ({why}): another sweep would not be seen")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with suppress(OSError):
                os.ftruncate(file, 0)
        self._let_go()

    def _take(self) -> None:
        folder, said = _made(leases_folder()), ""
        while (taken := self._tried(folder)) is not None:
            holder = _holder(folder, taken)
            if self._when_taken is WhenTaken.REFUSE:
                raise ConfigError(
                    f"lease=refuse: {_device(taken)} is in use by {holder}; wait for it, or add lease=none"
                )
            if holder != said:
                self._say(f"waiting for {_device(taken)}, in use by {holder}; lease=none runs beside it")
                said = holder
            time.sleep(POLL_S)
        for file in self._files:
            self._write_holder(file)

    def _tried(self, folder: Path) -> str | None:
        """The first lease that another holds, and then none is held; None where all are held now.

        All or none: two that wait for each other's GPUs would wait for ever.
        """
        for name, mode in self._modes.items():
            file = _opened(folder / name)
            self._files.append(file)
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except OSError as error:
                self._let_go()
                if error.errno not in TAKEN:
                    raise
                return name
        return None

    def _let_go(self) -> None:
        for file in self._files:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that was forked and is about to exec
            os.close(file)
        self._files.clear()

    def _write_holder(self, file: int) -> None:
        """What was there is of somebody who is gone: they did not have the time to take it away."""
        holder = Holder(
            pid=os.getpid(),
            user=_user(),
            words=shlex.join(sys.argv)[:MOST_WORDS],
            folder=str(self._folder.absolute()),
            since=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}",
        )
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(msgspec.to_builtins(holder)).encode(), 0)


def gpus_of(cells: Collection[RunConfig]) -> Sequence[str]:
    """The UUIDs of the GPUs that these cells use here; none where one uses the CPU, or they are unknown."""
    if any(cell.cluster.device != "cuda" for cell in cells):
        return ()
    uuids = visible_uuids()
    used = {cell.cluster.device_index(rank) for cell in cells for rank in range(cell.cluster.world_size)}
    return [uuids[index] for index in sorted(used) if index < len(uuids)]


def add_lease_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option `--lease`, as a sweep has the key; `lease_of` reads it."""
    parser.add_argument(
        "--lease",
        choices=LEASES,
        default=WhenTaken.WAIT.value,
        help="while another sweep runs on these devices: wait, refuse, or none to run beside it",
    )


def lease_of(arguments: argparse.Namespace, cells: Collection[RunConfig]) -> Lease:
    """The lease of a command's cells, on the devices that they use."""
    return Lease(gpus_of(cells), WhenTaken(arguments.lease), partial(print, flush=True))


def leases_folder() -> Path:
    """Where this machine's leases are: VARIABLE's folder, or FOLDER."""
    return Path(os.environ.get(VARIABLE) or FOLDER)


def _modes(gpus: Sequence[str]) -> Mapping[str, int]:
    """By lease how it is held, in one order for all."""
    if not gpus:
        return {MACHINE: fcntl.LOCK_EX}
    return {MACHINE: fcntl.LOCK_SH} | {f"gpu-{uuid}": fcntl.LOCK_EX for uuid in sorted(gpus)}


def _made(folder: Path) -> Path:
    """The folder, open to all users; each may remove only their own files."""
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(folder))
    return folder


def _opened(path: Path) -> int:
    """A lease's file; first without O_CREAT, with which the kernel may refuse another user's file in /tmp."""
    try:
        file = os.open(path, OPEN)
    except FileNotFoundError:
        file = os.open(path, OPEN | os.O_CREAT, 0o666)
        with suppress(PermissionError):  # another user was first
            os.fchmod(file, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no file", str(path))
    return file


def _holder(folder: Path, name: str) -> str:
    """Who holds a lease, in words; of the machine it may be whoever holds a GPU and shares it."""
    others = sorted(path.name for path in folder.iterdir() if path.name != MACHINE) if name == MACHINE else []
    found = ((_read(folder / each), folder / each) for each in (name, *others))
    lines = (holder.line for holder, path in found if holder is not None and _is_held_alone(path))
    return next(lines, "somebody who has not said who")


def _is_held_alone(path: Path) -> bool:
    """Whether a sweep holds it alone, and so has written who it is."""
    try:
        file = _opened(path)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _read(path: Path) -> Holder | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_BYTES), type=Holder)
    except (OSError, ValueError, RecursionError):
        return None


def _device(name: str) -> str:
    return "this machine" if name == MACHINE else f"GPU {name.removeprefix('gpu-')}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
