"""The folder of one rank on one path: made, judged, and owned by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Final

from kvtiers.model.errors import StoreError

_logger = logging.getLogger(__name__)

_LOCK: Final = "owner.lock"
_NETWORK: Final = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gluster", "fuse.", "afs", "gpfs")
_MEMORY: Final = ("tmpfs", "ramfs")


class OwnedFolder:
    """A folder that this process owns until `close`, or until it dies.

    The lock is the kernel's: a process that was killed has left it, whatever is written in
    the file.

    Raises:
        StoreError: the folder cannot be made or written, belongs to another user, or another
            process owns it: the message says who.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        _make(folder)
        self.filesystem = filesystem_of(folder)
        self._fd = _open_lock(folder / _LOCK)
        try:
            _lock(self._fd)
        except OSError as error:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise StoreError(
                f"{folder} is in use by {holder} ({error.strerror}); give each engine an instance "
                "of its own, or end that process"
            ) from error
        self._sign()
        self._warn()

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sign(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": time.time()}
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a signature
            os.pwrite(self._fd, json.dumps(holder).encode() + b"\n", 0)

    def _warn(self) -> None:
        if self.filesystem.startswith(_MEMORY):
            _logger.warning(
                "%s is on %s: its frames take memory and do not outlive the machine; "
                "raise the dram tier instead, or choose a path on a disk",
                self.path,
                self.filesystem,
            )
        elif self.filesystem.startswith(_NETWORK):
            _logger.warning(
                "%s is on a network file system (%s): expect slow calls, and locks that another "
                "host may not see; choose a path on a local disk",
                self.path,
                self.filesystem,
            )


def filesystem_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system a folder lies on, "unknown" if the system is silent."""
    real = folder.resolve()
    best, found = -1, "unknown"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if real.is_relative_to(point) and len(point) >= best:
            best, found = len(point), kind
    return found


def _make(folder: Path) -> None:
    """Make a folder and its parents, private to this user."""
    try:
        for part in reversed((folder, *folder.parents)):
            if not part.exists():
                part.mkdir(mode=0o700, exist_ok=True)  # another rank may be as far
        owner = folder.stat().st_uid
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a directory")
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {folder}: {error.strerror or error}; name a folder that user "
            f"{os.geteuid()} may write"
        ) from error
    if owner != os.geteuid():
        raise StoreError(
            f"{folder} belongs to user {owner}, this process is user {os.geteuid()}; "
            "choose another path or instance, or change its owner"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"{folder} may not be written by user {os.geteuid()}; chmod 700 it")
    folder.chmod(0o700)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(
            f"cannot open {path}: {error.strerror}; the folder must be writable by user "
            f"{os.geteuid()}"
        ) from error


def _holder(fd: int) -> str:
    """Return what a lock file says of its owner."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(found["start"])))
        return f"process {int(found['pid'])} on host {found['host']}, since {start}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process that has not signed"


_LOOK_SECONDS: Final = 0.1


def _lock(fd: int) -> None:
    """Take a lock alone; somebody who only looks whether it is free has it for microseconds."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS / 20)
        else:
            return


def lock_of(folder: Path) -> Path:
    """Return the lock file of a rank's folder."""
    return folder / _LOCK
