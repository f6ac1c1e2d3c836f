"""The advisory locks of an LMDB environment's folder; each ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.model.errors import StoreError

USERS: Final = "users.lock"
DOOR: Final = "door.lock"

_PAUSE_SECONDS: Final = (0.001, 0.01)  # between two attempts: not all at one time


@contextmanager
def passing(folder: Path, seconds: float) -> Iterator[None]:
    """Be the only process that opens, closes, grows, checks or replaces a folder's environment.

    All that reads the state in order to act on it, and all that changes it, happens inside. LMDB
    cuts a file that it opens for writing through the mapping to the size that it is told: a size
    that was read before another process has grown the file would cut that one's frames off.

    Never to be entered in a transaction, of which another process may be waiting inside.

    Raises:
        UnavailableError: others are inside all the time. StoreError: the file system has no locks.
        OSError: there is no such folder.
    """
    deadline = time.monotonic() + seconds
    while True:
        fd = os.open(folder / DOOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _flock(folder, fd, fcntl.LOCK_EX) and _is_at(fd, folder / DOOR):
                yield
                return
        finally:
            os.close(fd)
        if time.monotonic() > deadline:
            raise UnavailableError(f"{folder}: another process opens or checks it all the time")
        time.sleep(random.uniform(*_PAUSE_SECONDS))


class UsersLock:
    """Who has an environment open.

    Whoever has it alone may create, check or set the file aside; all others share it. What it
    holds changes only inside `passing`: one kind of a lock becomes another by way of none.

    Raises:
        OSError: the lock file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd: int | None = os.open(folder / USERS, flags, 0o600)
        self._folder = folder

    def try_alone(self) -> bool:
        """Take the lock alone unless another has it; gives up a share that was held.

        Raises:
            StoreError: the file system has no locks.
        """
        return self._try(fcntl.LOCK_EX)

    def try_share(self) -> bool:
        """Take a share unless another is alone; raises what `try_alone` does."""
        return self._try(fcntl.LOCK_SH)

    def in_place(self) -> bool:
        """Whether this is still the lock that others find in the folder."""
        return self._fd is not None and _is_at(self._fd, self._folder / USERS)

    def release(self) -> None:
        """Give it up; idempotent. A child process that inherited it keeps nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def drop_inherited(self) -> None:
        """Let go of what a child process has inherited: the parent's lock ends with the parent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _try(self, kind: int) -> bool:
        assert self._fd is not None, "the lock was released"
        return _flock(self._folder, self._fd, kind)


def _flock(folder: Path, fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"{folder} lies on a file system without locks ({error}): an LMDB store needs a local "
            "disk"
        ) from error
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one of that name: somebody may have removed the folder."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False
