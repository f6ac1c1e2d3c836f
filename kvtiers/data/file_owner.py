"""Who holds a store, found out without disturbing it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOCKS: Final = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process, or processes, that have a store open.

    Attributes:
        pids: empty where the system does not say. host: its name.
        since: Unix time, None where nobody says.
    """

    pids: tuple[int, ...]
    host: str
    since: float | None = None

    def __str__(self) -> str:
        who = ", ".join(f"process {pid}" for pid in self.pids) or "another process"
        return f"{who} on host {self.host}"


def owner_of(lock: Path) -> Owner | None:
    """Return who owns a rank's folder, by its lock file; None for nobody.

    Raises:
        OSError: the lock file cannot be opened.
    """
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        pids = _holders(fd)
        # Whoever looks by taking the lock has it for a moment: only where the table is silent.
        if not pids and _is_free(fd, fcntl.LOCK_SH):
            return None
        text = os.pread(fd, 4096, 0)
    finally:
        os.close(fd)
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        signed = json.loads(text)
        return Owner((int(signed["pid"]),), str(signed["host"]), float(signed["start"]))
    return Owner(pids, socket.gethostname())


def users_of(lock: Path) -> Owner | None:
    """Return who shares a lock file, None for nobody; raises what `owner_of` does."""
    fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        pids = _holders(fd)
        if not pids and _is_free(fd, fcntl.LOCK_EX):
            return None
    finally:
        os.close(fd)
    return Owner(pids, socket.gethostname())


def _holders(fd: int) -> tuple[int, ...]:
    """Return who has an open file locked, as far as the kernel's table of locks tells us."""
    found = os.fstat(fd)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = LOCKS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
    fields = [line.split() for line in lines]
    pids = {int(f[4]) for f in fields if len(f) > 5 and f[1] == "FLOCK" and f[5] == place}
    return tuple(sorted(pid for pid in pids if pid > 0))  # others are of another container


def _is_free(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
