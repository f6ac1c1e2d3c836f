"""Access to an LMDB environment that may go away and come back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import lmdb

from kvtiers.data.lmdb_environment import LMDBEnvironment, damaged
from kvtiers.data.lmdb_errors import BusyError, UnavailableError
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.model.errors import CapacityError, KVTiersError, StoreError

logger = logging.getLogger(__name__)

_HURRY_SECONDS: Final = 0.2
_CHECK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Session:
    """One transaction, and the environment that it is of."""

    env: LMDBEnvironment
    txn: lmdb.Transaction[Any]


class LMDBAccess:
    """Opens an environment when it is wanted, and again after it has gone.

    It says once that a store has gone, and once that it is back. Between, everything raises
    `UnavailableError` at once, but for one attempt to open it every `reprobe_seconds`. A child
    process, and whoever unpickles it, opens its own.

    Args:
        settings: where it is. create: whether to make what is missing, and tell what is wrong
            with the configuration; a reader does neither.
    """

    def __init__(
        self,
        settings: LMDBStoreSettings,
        *,
        create: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        # While a process serves nobody waits long: others may go on with misses.
        self._hurried = replace(
            settings,
            open_seconds=min(settings.open_seconds, _HURRY_SECONDS),
            check_seconds=min(settings.check_seconds, _CHECK_SECONDS),
            hurried=True,
        )
        self._create = create
        self._clock = clock
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._env: LMDBEnvironment | None = None
        self._device: int | None = None  # that the folder lies on
        self._gone = False
        self._next_attempt = float("-inf")
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings, "create": self._create}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["settings"], create=state["create"])  # type: ignore[misc]

    def open(self) -> LMDBEnvironment:
        """Return the environment, opened if it is not.

        Raises:
            StoreError, CapacityError: what is configured cannot be; only on the first opening.
            UnavailableError: it is not there now.
        """
        if self._pid != os.getpid():
            self.__setstate__(self.__getstate__())
        with self._mutex:
            if self._env is not None:
                return self._env
            if self._closed or self._clock() < self._next_attempt:
                raise UnavailableError(f"{self.settings.path} is away")
            try:
                self._env = self._acquire()
            except UnavailableError as error:
                self._note_gone(str(error))
                raise
            if self._gone:
                self._gone = False
                logger.warning("the LMDB store at %s is back", self.settings.path)
            return self._env

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Read in one transaction.

        Raises:
            UnavailableError: see `open`. StoreError, CapacityError: see `open`.
        """
        env = self.open()
        with self._watched(env), env.reading() as txn:
            yield Session(env, txn)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Write in one transaction, committed unless the body raises.

        Raises:
            UnavailableError: see `open`. lmdb.Error: nothing was written.
        """
        env = self.open()
        with self._watched(env), env.writing() as txn:
            yield Session(env, txn)

    def check(self) -> None:
        """Find out whether the file has gone, or is back.

        To be called when idle: what is lost is made anew only after all processes have let go.
        """
        with suppress(KVTiersError), self.reading():
            pass

    def close(self) -> None:
        """Give the environment back; idempotent."""
        with self._mutex:
            self._closed = True
            env, self._env = self._env, None
        if env is not None:
            REGISTRY.release(env)

    # -- internals --------------------------------------------------------------------

    def _acquire(self) -> LMDBEnvironment:
        if self._device is not None and self._device_now() != self._device:
            raise UnavailableError(f"the disk of {self.settings.path} is not mounted")
        try:
            first = self._device is None and self._create
            settings = self.settings if first else self._hurried
            env = REGISTRY.acquire(settings, create=self._create)
        except (StoreError, CapacityError) as error:
            if self._device is None and self._create:
                raise  # the first time: somebody has configured this
            raise UnavailableError(str(error)) from error
        self._device = self._device_now()
        return env

    def _device_now(self) -> int | None:
        try:
            return self.settings.path.resolve().parent.stat().st_dev
        except OSError:
            return None

    @contextmanager
    def _watched(self, env: LMDBEnvironment) -> Iterator[None]:
        try:
            yield
        except BusyError:
            raise
        except UnavailableError as error:
            self._lose(env, str(error))
            raise
        except lmdb.Error as error:
            if damaged(env, error):
                self._lose(env, str(error))
                raise UnavailableError(str(error)) from error
            raise

    def _lose(self, env: LMDBEnvironment, why: str) -> None:
        env.lost = True  # for the others of this process as well
        with self._mutex:
            mine = self._env is env
            if mine:
                self._env = None
                self._note_gone(why)
        if mine:
            REGISTRY.release(env)

    def _note_gone(self, why: str) -> None:
        self._next_attempt = self._clock() + self.settings.reprobe_seconds
        if not self._gone and (self._create or self._device is not None):
            logger.warning("the LMDB store at %s is away: %s", self.settings.path, why)
        self._gone = self._gone or self._create or self._device is not None
