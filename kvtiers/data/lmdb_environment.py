"""One open LMDB environment: its transactions, its growth, and what can befall its file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lmdb

from kvtiers.data import lmdb_folder
from kvtiers.data.lmdb_errors import BusyError, UnavailableError
from kvtiers.data.lmdb_files import DATA, LOCK, State, distrust, read_state, write_state
from kvtiers.data.lmdb_gate import Gate
from kvtiers.data.lmdb_locks import UsersLock, passing
from kvtiers.data.lmdb_records import COUNTERS_KEY, FRAMES, INDEX, META, ORDER, Counters
from kvtiers.model.errors import CapacityError, KVTiersError

logger = logging.getLogger(__name__)

_PREPARE_NBYTES: Final = 32 << 20
_ZEROS: Final = memoryview(bytes(1 << 20))
_ATTEMPTS: Final = 4
_DRAIN_SECONDS: Final = 10.0
_PASS_SECONDS: Final = 2.0  # for others that open or grow, which takes them milliseconds
# What a damaged file, or one that was changed behind LMDB's back, makes it raise.
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.NotFoundError,
)


class LMDBEnvironment:
    """One open environment. Any thread of the process that opened it may use it.

    It is opened without syncing: a frame that a crash of the machine loses is a miss, and syncing
    costs nine tenths of the speed. What is left of a crash is found by `State` and by checksums.

    The capacity and the map are those that its creator recorded, and changed by `grow` only:
    a process that asks for others is told both numbers and gets what there is.

    It is opened inside `passing`, with the state that was read there.
    """

    def __init__(self, folder: Path, state: State, lock: UsersLock, max_readers: int) -> None:
        self.folder = folder
        self.state = state
        self.users = 0
        self.lost = False
        self.closed = False
        self.pid = os.getpid()
        self._lock = lock
        self._gate = Gate()
        self._env = lmdb.open(
            str(folder),
            map_size=state.map_nbytes,  # never less than the file's: see `passing`
            max_dbs=4,
            mode=0o600,
            max_readers=max_readers,
            create=False,
            sync=False,
            writemap=state.write_map,
            readahead=True,  # cold reads are 17 times slower without
        )
        with ExitStack() as opened:
            opened.callback(self._env.close)
            self._env.reader_check()
            self.frames, self.index, self.order, self.meta = (
                self._env.open_db(name, create=False) for name in (FRAMES, INDEX, ORDER, META)
            )
            found = (folder / DATA).stat()
            self.identity = (found.st_dev, found.st_ino)
            self._lock_nbytes = (folder / LOCK).stat().st_size
            self._page_nbytes = int(self._env.stat()["psize"])
            self._complete_growth()
            opened.pop_all()

    @property
    def map_nbytes(self) -> int:
        """Bytes that the file may grow to, as this process sees it."""
        self._gate.enter()  # the numbers lie in the map
        try:
            return int(self._env.info()["map_size"])
        finally:
            self._gate.leave()

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction[Any]]:
        """Read in one short transaction. Its views must be let go of inside.

        Raises:
            UnavailableError: the file has gone, or no transaction is to be had.
        """
        txn = self._begin(write=False)
        try:
            yield txn
        finally:
            txn.abort()
            self._gate.leave()

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[Any]]:
        """Write in one transaction; waits for other writers, committed unless the body raises.

        Raises:
            UnavailableError: see `reading`. lmdb.Error: the commit failed, and nothing happened.
        """
        txn = self._begin(write=True)
        try:
            yield txn
            txn.commit()
        finally:
            txn.abort()  # of a transaction that is over: nothing
            self._gate.leave()

    def free_stale_readers(self) -> int:
        """Free what killed readers hold; returns how many there were."""
        self._gate.enter()
        try:
            return int(self._env.reader_check())
        except lmdb.Error as error:
            logger.debug("%s: cannot look for stale readers: %s", self.folder, error)
            return 0
        finally:
            self._gate.leave()

    def prepare(self, counters: Counters, nbytes: int) -> None:
        """Make pages beyond the last one ready for a write of so many bytes.

        Through the mapping, the first write to a preallocated page costs 10 us, a hundred times
        the copy, unless the page was written before: zeros by `pwrite` come at 2 GB/s.
        To be called in a write transaction that has changed nothing yet.
        """
        used = (int(self._env.info()["last_pgno"]) + 1) * self._page_nbytes
        if not self.state.write_map or used + nbytes <= counters.prepared_nbytes:
            return
        start = max(used, counters.prepared_nbytes)
        end = min(start + max(nbytes, _PREPARE_NBYTES), self.state.map_nbytes)
        fd = os.open(self.folder / DATA, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while start < end:
                start += os.pwrite(fd, _ZEROS[: end - start], start)
        finally:
            os.close(fd)
        counters.prepared_nbytes = max(counters.prepared_nbytes, end)

    def counters(self, txn: lmdb.Transaction[Any]) -> Counters:
        """Return the counters as a transaction sees them.

        Raises:
            UnavailableError: there are none.
        """
        record = txn.get(COUNTERS_KEY, db=self.meta)
        if record is None:
            raise UnavailableError(f"{self.folder} has no counters")
        return Counters.decode(record)

    def grow(self, capacity_nbytes: int) -> None:
        """Raise the capacity for all processes; they adopt it with their next transactions.

        Raises:
            CapacityError: it is no more than now, or the disk has no room.
            UnavailableError: own transactions do not end, or others open the file all the time.
        """
        with passing(self.folder, _DRAIN_SECONDS):
            state = self._state_now()
            if capacity_nbytes <= state.capacity_nbytes:
                raise CapacityError(
                    f"{self.folder} has a capacity of {state.capacity_nbytes} bytes: "
                    f"{capacity_nbytes} is no growth"
                )
            map_nbytes = max(state.map_nbytes, lmdb_folder.map_nbytes_for(capacity_nbytes))
            if state.write_map:
                if not lmdb_folder.preallocate(self.folder, map_nbytes):
                    raise CapacityError(
                        f"the disk of {self.folder} has no room for {map_nbytes} bytes"
                    )
            else:
                lmdb_folder.check_room(self.folder, map_nbytes)
            # File, state, map, counters: whoever is killed between leaves what another can open.
            state = replace(state, capacity_nbytes=capacity_nbytes, map_nbytes=map_nbytes)
            write_state(self.folder, state)
            self._adopt(state)
            self._record_capacity()

    def adopt_growth(self) -> bool:
        """Map what another process has grown the file to; returns whether it had.

        Raises:
            UnavailableError: own transactions do not end, or others open the file all the time.
        """
        with passing(self.folder, _PASS_SECONDS):
            state = self._state_now()
            grown = state.map_nbytes > self.map_nbytes
            self._adopt(state)
        return grown

    def close(self, patience_seconds: float = _DRAIN_SECONDS) -> bool:
        """Close the file once no transaction of this process runs in it; idempotent.

        The last of all processes leaves it marked as clean.

        Returns:
            Whether it is closed: its mapping is not taken from under a transaction.
        """
        if self.closed or self.pid != os.getpid():
            return True  # or inherited by fork: it is the parent's
        with self._gate.emptied(patience_seconds) as empty:
            if empty:
                self.closed = True
                self._close()
            self.lost = True
        return self.closed

    def drop_inherited_lock(self) -> None:
        """Give up, right after a fork, what would keep others out until the child ends."""
        self._lock.drop_inherited()

    def drop_inherited(self) -> None:
        """Let go, in a child process, of what it has inherited; the parent notices nothing.

        LMDB takes back no reader of another process, and a child's end of a mapping is its own.
        """
        if self.pid != os.getpid():
            self.lost = True
            self._env.close()

    # -- internals --------------------------------------------------------------------

    def _close(self) -> None:
        try:
            if self.lost:
                return
            with passing(self.folder, _PASS_SECONDS):
                last = self._in_place() and self._lock.try_alone()
                if last:
                    self._env.sync(True)
                self._env.close()
                if last:
                    write_state(self.folder, replace(self._state_now(), clean=True))
        except (OSError, lmdb.Error, KVTiersError) as error:
            logger.warning("%s is not marked as clean: %s", self.folder, error)
        finally:
            self._env.close()  # where it is closed already: nothing
            self._lock.release()

    def _in_place(self) -> bool:
        """Whether the folder still has the files that were opened."""
        try:
            found = (self.folder / DATA).stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity and self._lock.in_place()

    def _state_now(self) -> State:
        """Return the state as it is on the disk; inside `passing`.

        Raises:
            UnavailableError: there is none.
        """
        state = read_state(self.folder)
        if state is None:
            raise UnavailableError(f"{self.folder} has lost its state")
        return state

    def _adopt(self, state: State) -> None:
        """Map as much as a state says; inside `passing`, whose state it is."""
        needed = lmdb_folder.inspect(self.folder, state)
        map_nbytes = max(state.map_nbytes, needed.map_nbytes)
        lmdb_folder.reach_map(self.folder, state, map_nbytes)
        if map_nbytes > self.map_nbytes:
            self._resize(map_nbytes)
        self.state = replace(state, map_nbytes=map_nbytes)

    def _complete_growth(self) -> None:
        """Finish what a killed process has begun to grow; inside `passing`."""
        try:
            with self.reading() as txn:
                behind = self.counters(txn).capacity_nbytes < self.state.capacity_nbytes
        except BusyError:
            return  # the next opener will see to it
        if behind:
            self._record_capacity()

    def _record_capacity(self) -> None:
        """Have the counters say what the state says: by this commit others learn of it."""
        with self.writing() as txn:
            counters = self.counters(txn)
            counters.capacity_nbytes = max(counters.capacity_nbytes, self.state.capacity_nbytes)
            txn.put(COUNTERS_KEY, counters.encode(), db=self.meta)

    def _begin(self, *, write: bool) -> lmdb.Transaction[Any]:
        for _ in range(_ATTEMPTS):
            self._gate.enter()
            try:
                self._check()
                if write:
                    return self._env.begin(write=True)
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._gate.leave()
                self.adopt_growth()
            except lmdb.ReadersFullError:
                self._gate.leave()
                self.free_stale_readers()
            except UnavailableError:
                self._gate.leave()
                raise
            except lmdb.Error as error:
                self._gate.leave()
                raise UnavailableError(f"{self.folder}: {error}") from error
        raise BusyError(f"{self.folder}: no transaction after {_ATTEMPTS} attempts")

    def _resize(self, map_nbytes: int) -> None:
        """Map anew, while no own transaction runs."""
        with self._gate.emptied(_DRAIN_SECONDS) as empty:
            if not empty:
                raise BusyError(f"{self.folder}: own transactions do not end")
            try:
                self._env.set_mapsize(map_nbytes)
            except lmdb.Error as error:
                raise UnavailableError(f"{self.folder}: {error}") from error

    def _check(self) -> None:
        """See that the file is there, readable and whole, before its mapping is touched.

        Raises:
            UnavailableError: it is not.
        """
        if self.lost or self.pid != os.getpid():
            raise UnavailableError(f"{self.folder} was left behind")
        try:
            above, found = self.folder.stat(), (self.folder / DATA).stat()
            lock_nbytes = (self.folder / LOCK).stat().st_size
        except OSError as error:
            raise UnavailableError(str(error)) from error
        if (found.st_dev, found.st_ino) != self.identity:
            raise UnavailableError(f"{self.folder / DATA} is another file now")
        if above.st_mode & 0o700 != 0o700 or found.st_mode & 0o600 != 0o600:
            raise UnavailableError(f"{self.folder} may not be read and written")
        if found.st_size < self.state.map_nbytes or lock_nbytes < self._lock_nbytes:
            raise UnavailableError(f"{self.folder / DATA} was cut to {found.st_size} bytes")


def damaged(env: LMDBEnvironment, error: lmdb.Error) -> bool:
    """Whether an error says that the file is damaged; if so its next opener checks it."""
    if not isinstance(error, _DAMAGE):
        return False
    distrust(env.folder)
    return True
