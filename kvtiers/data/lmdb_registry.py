"""Which LMDB environments this process has open: each file once, shared by all who use it."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import lmdb

from kvtiers.data import lmdb_folder
from kvtiers.data.lmdb_environment import LMDBEnvironment
from kvtiers.data.lmdb_errors import BusyError, UnavailableError
from kvtiers.data.lmdb_files import DATA
from kvtiers.data.lmdb_locks import UsersLock, passing
from kvtiers.data.lmdb_settings import LMDBStoreSettings

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = (0.002, 0.02)  # of who waits for others to let go: not all at one time


class Registry:
    """Which environments this process has open, by the identity of their files.

    Opening a file twice in one process drops the locks of both: they are the process's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open_ones: dict[tuple[int, int], LMDBEnvironment] = {}
        self._pid = os.getpid()
        self._judged: set[Path] = set()  # whose file systems were looked at
        self._watches_forks = False

    def acquire(self, settings: LMDBStoreSettings, *, create: bool = True) -> LMDBEnvironment:
        """Return the environment of a path, opened if it is not yet; give back by `release`.

        Args:
            settings: path and bounds. create: whether to make what is missing.

        Raises:
            StoreError, CapacityError: it cannot be used; says why, and the remedy.
            UnavailableError: it is not there (unless created), or is just being let go of.
        """
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            if not self._watches_forks:
                os.register_at_fork(after_in_child=self._drop_locks)
                self._watches_forks = True
            try:
                judge = create and settings.path not in self._judged
                folder = lmdb_folder.prepare_path(settings.path, create=create, judge=judge)
                if judge:
                    self._judged.add(settings.path)
                env = self._known(folder) or self._open(folder, settings, create=create)
            except (OSError, lmdb.Error) as error:
                raise UnavailableError(f"{settings.path}: {error}") from error
            self._open_ones[env.identity] = env
            env.users += 1
        if create and env.state.capacity_nbytes != settings.capacity_nbytes:
            logger.warning(
                "%s was made with a capacity of %d bytes, the configuration says %d: the former "
                "holds", settings.path, env.state.capacity_nbytes, settings.capacity_nbytes,
            )  # fmt: skip
        return env

    def release(self, env: LMDBEnvironment) -> None:
        """Give an environment back; the last user closes it."""
        if env.pid != os.getpid():
            return
        with self._lock:
            env.users -= 1
            if env.users == 0 and env.close() and self._open_ones.get(env.identity) is env:
                del self._open_ones[env.identity]

    def _known(self, folder: Path) -> LMDBEnvironment | None:
        with suppress(OSError):
            found = (folder / DATA).stat()
            env = self._open_ones.get((found.st_dev, found.st_ino))
            if env is None or not env.lost:
                return env
            if not env.close(0.0):  # its users may be idle, and find out whenever they come
                raise BusyError(f"{folder} is being let go of")
            del self._open_ones[env.identity]
        return None

    def _open(self, folder: Path, settings: LMDBStoreSettings, *, create: bool) -> LMDBEnvironment:
        deadline = time.monotonic() + settings.open_seconds
        with suppress(OSError):  # another process may be checking what is there
            if not settings.hurried:
                deadline += settings.patience((folder / DATA).stat().st_blocks * 512)
        while True:
            if not create and not (folder / DATA).exists():
                raise UnavailableError(f"{folder} holds no environment")
            with passing(folder, deadline - time.monotonic()):
                env = _open_ready(folder, settings, create=create)
            if env is not None:
                return env
            if time.monotonic() > deadline:
                raise UnavailableError(f"{folder}: nobody has made it ready, or checked it")
            time.sleep(random.uniform(*_PAUSE_SECONDS))

    def _drop_locks(self) -> None:
        for env in list(self._open_ones.values()):
            env.drop_inherited_lock()

    def _forget(self) -> None:
        inherited = list(self._open_ones.values())
        self._lock = threading.Lock()  # the parent may have held it at the fork
        self._open_ones = {}
        self._pid = os.getpid()
        for env in inherited:
            env.drop_inherited()


def _open_ready(
    folder: Path, settings: LMDBStoreSettings, *, create: bool
) -> LMDBEnvironment | None:
    """Open an environment, None if it must wait for others; inside `passing`."""
    lock = UsersLock(folder)
    env = None
    try:
        state = lmdb_folder.state_for_use(folder, lock, settings, create=create)
        if state is not None:
            env = LMDBEnvironment(folder, state, lock, settings.max_readers)
    finally:
        if env is None:
            lock.release()
    return env


REGISTRY: Final = Registry()
