"""The folder of one rank on one path: made, judged, and owned by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Final

from kvtiers.model.errors import StoreError

_LOCK: Final = "owner.lock"
_LOOK_SECONDS: Final = 0.1  # that a lock may be held by who only looks


class OwnedFolder:
    """A folder that this process owns until `close`, or until it dies.

    The lock is the kernel's: a process that was killed has left it, whatever is written in
    the file.

    Raises:
        StoreError: the folder cannot be made, written or locked, belongs to another user, or
            another process owns it: the message says who.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        _make(folder)
        self._fd = _open_lock(folder / _LOCK)
        try:
            _lock(self._fd)
        except OSError as error:
            holder = _holder(self._fd)
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise StoreError(
                    f"{folder} is in use by {holder} ({error.strerror}); give each engine an "
                    "instance of its own, or end that process"
                ) from error
            raise StoreError(
                f"{folder} lies on a file system without locks ({error.strerror}), where nothing "
                "keeps a second engine out: name a folder on a local disk"
            ) from error
        self._sign()

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


def _make(folder: Path) -> None:
    """Make a folder and its parents, private to this user."""
    try:
        for part in reversed((folder, *folder.parents)):
            if not part.exists():
                with contextlib.suppress(FileExistsError):  # another rank may be as far
                    part.mkdir(mode=0o700)
            if not part.is_dir():
                raise NotADirectoryError(0, f"{part} {_instead(part)}")
    except OSError as error:
        raise StoreError(
            f"cannot make the folder {folder}: {error.strerror or error}; {_remedy(error)}"
        ) from error
    for own in (folder.parent, folder):  # the instance and the rank; the path may be anyone's
        judge_own(own)
    folder.chmod(0o700)


def _instead(part: Path) -> str:
    if part.is_symlink():
        return f"is a symbolic link to {os.readlink(part)}, which is no folder"
    return "is a file, not a folder" if part.is_file() else "is not a folder"


def _remedy(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "its file system is mounted read-only: mount it read-write, or name another path"
    return f"name a folder that user {os.geteuid()} may write"


def judge_own(own: Path) -> None:
    """Refuse a folder of ours that somebody else made or can move.

    Raises:
        StoreError: says whose it is, and the remedy.
    """
    user = os.geteuid()
    if own.is_symlink():
        raise StoreError(
            f"{own} is a symbolic link, where kvtiers makes folders of its own; remove it, and "
            "name the folder that it points to as a path"
        )
    owner = own.stat().st_uid
    if owner != user:
        raise StoreError(
            f"{own} belongs to user {owner}, this process is user {user}; "
            "choose another path or instance, or change its owner"
        )
    if os.statvfs(own).f_flag & os.ST_RDONLY:
        read_only = OSError(errno.EROFS, "")
        raise StoreError(f"{own} cannot be written: {_remedy(read_only)}")
    if not os.access(own, os.R_OK | os.W_OK | os.X_OK):
        raise StoreError(f"{own} may not be written by user {user}; chmod 700 it")


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
    except (ValueError, KeyError, TypeError, OSError, OverflowError, RecursionError):
        return "another process that has not signed"


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
