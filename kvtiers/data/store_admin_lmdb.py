"""Looking after one LMDB store, in place, as one more of the processes that share it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import lmdb

from kvtiers.data import lmdb_check
from kvtiers.data.disk_check import describe_mount
from kvtiers.data.file_owner import Owner, users_of
from kvtiers.data.frame_check import FrameChecker
from kvtiers.data.generation_file import recorded_generations
from kvtiers.data.lmdb_access import LMDBAccess, Session
from kvtiers.data.lmdb_files import (
    DATA,
    DISTRUSTED,
    SET_ASIDE,
    State,
    current_boot_id,
    distrust,
    inspect_data,
    read_state,
)
from kvtiers.data.lmdb_records import FORMAT_VERSION, footprint, unpack_index
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_shelf import MAX_EVICTIONS, Shelf
from kvtiers.data.store_admin_values import Dropped, Fault, Progress, StoreStat, Verdict
from kvtiers.model.errors import CapacityError, KVTiersError, StoreError
from kvtiers.model.keys import StoreKey

USERS_LOCK: Final = "users.lock"

_BATCH_FRAMES: Final = 64  # of one read transaction, and
_BATCH_NBYTES: Final = 2**24  # pages that are freed meanwhile wait for its end
_QUARANTINE_KEYS: Final = 64  # of one transaction
_CHECK_SECONDS: Final = 24 * 3600.0  # of a file that a crash has left: as long as it takes
_CLOCK_NBYTES: Final = 8


class LmdbStoreAdmin:
    """An LMDB store, by its folder.

    Raises:
        KVTiersError: it is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = self._read_state()

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def used_nbytes(self) -> int:
        """What `evict` counts: whole pages of the frames."""
        with self._opened() as access, access.reading() as session:
            return session.env.counters(session.txn).used_nbytes

    def stat(self) -> StoreStat:
        """Say what it is and holds; what is wrong with it is its `problem`."""
        problem = self._distrust()
        known: dict[str, int] = {}
        changes: int | None = None
        if problem is None:
            try:
                with self._opened() as access, access.reading() as session:
                    counters = session.env.counters(session.txn)
                    known = {
                        "num_frames": counters.num_frames,
                        "used_nbytes": counters.used_nbytes,
                        "capacity_nbytes": counters.capacity_nbytes,
                    }
                    with session.txn.cursor(session.env.order) as cursor:
                        if cursor.first():
                            first = int.from_bytes(bytes(cursor.key()[:_CLOCK_NBYTES]), "big")
                            changes = counters.clock - first
            except StoreError as error:
                problem = str(error)
        generations: dict[str, int] = {}
        try:
            generations = recorded_generations(self._folder)
        except StoreError as error:
            problem = problem or str(error)
        return StoreStat(
            kind="lmdb",
            name=self.name,
            paths=(self.name,),
            filesystem=describe_mount(self._folder).fs_type,
            owner=self._users(),
            generations=generations,
            format_version=FORMAT_VERSION if self._state is not None else None,
            problem=problem,
            disk_nbytes=sum(path.stat().st_blocks * 512 for path in self._folder.glob("*.mdb")),
            changed_seconds_ago=max(0.0, time.time() - (self._folder / DATA).stat().st_mtime),
            num_changes_since_oldest_access=changes,
            **known,
        )

    def num_to_verify(self) -> tuple[int, int]:
        """Return how many frames there are, and their bytes; none before it can be trusted."""
        if self._distrust() is not None:
            return 0, 0
        with self._opened() as access, access.reading() as session:
            counters = session.env.counters(session.txn)
            return counters.num_frames, counters.used_nbytes

    def verify(self, progress: Progress, *, quarantine: bool) -> Verdict:
        """Read every frame, and drop what is damaged, for all processes.

        What a crash of the machine has left is first read as a whole in a process of its own; a
        file that does not fit together is set aside, as its next user would do.

        Args:
            progress: told of each piece. quarantine: whether to drop, and to set aside.

        Raises:
            StoreError: it cannot be read.
        """
        started = time.perf_counter()
        verdict = Verdict(self.name)
        problem = self._distrust()
        if problem is not None and self._users() is None:
            problem = self._judge_whole(quarantine=quarantine)
        if problem is not None:
            verdict.problem = problem
        else:
            with self._opened(create=quarantine) as access:
                try:
                    self._verify(access, verdict, progress)
                except (KVTiersError, lmdb.Error) as error:
                    verdict.problem = (
                        f"{self._folder} cannot be read to the end: {error}; if it is damaged, its "
                        "next user sets it aside"
                    )
                if quarantine and verdict.faults:
                    self._quarantine(access, verdict)
        verdict.seconds = time.perf_counter() - started
        return verdict

    def clear(self) -> Dropped:
        """Drop every frame, for all processes, some at a time.

        Raises:
            StoreError: it cannot be done; what was dropped is.
        """
        with self._opened(create=True) as access:
            before = self._num_frames(access)
            while self._num_frames(access) > MAX_EVICTIONS and self._evict(access, 2**62):
                pass
            self._change(access, Shelf.clear)
            left = self._num_frames(access)
        return Dropped(self.name, max(0, before - left), left, by_owner=False)

    def evict(self, nbytes: int) -> Dropped:
        """Drop the frames whose last access is longest ago, until no more than so many bytes.

        Raises:
            StoreError: see `clear`.
        """
        with self._opened(create=True) as access:
            before = self._num_frames(access)
            while True:
                with _said(self._folder), access.reading() as session:
                    excess = session.env.counters(session.txn).used_nbytes - nbytes
                if excess <= 0 or not self._evict(access, excess):
                    break
            left = self._num_frames(access)
        return Dropped(self.name, max(0, before - left), left, by_owner=False)

    # -- the store as a whole ---------------------------------------------------------

    def _read_state(self) -> State | None:
        try:
            return read_state(self._folder)
        except OSError as error:
            raise StoreError(f"cannot read {self._folder}: {error.strerror}") from error

    def _users(self) -> Owner | None:
        try:
            return users_of(self._folder / USERS_LOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"cannot open {self._folder / USERS_LOCK}: {error.strerror}; run as the user whose "
                "store it is"
            ) from error

    def _distrust(self) -> str | None:
        """Return why the file may not be opened as it is, None where it may."""
        try:
            found = inspect_data(self._folder / DATA)
            if found is not None and not found.complete:  # it may just have grown
                found = inspect_data(self._folder / DATA)
        except OSError as error:
            raise StoreError(f"cannot read {self._folder / DATA}: {error.strerror}") from error
        begin = "the next start of an engine sets it aside and begins anew"
        if self._state is None:
            return f"nothing says what wrote {self._folder / DATA}; {begin}"
        if found is None or not found.complete:
            return f"{self._folder / DATA} was cut or is damaged; {begin}"
        trusted = self._state.trusted(current_boot_id())
        if not trusted or (self._folder / DISTRUSTED).exists():
            return (
                f"{self._folder} was in use when the machine stopped, or was found damaged since; "
                "`kvtiers store verify`, or the next start of an engine, reads all of it first"
            )
        return None

    def _judge_whole(self, *, quarantine: bool) -> str | None:
        """Read a file that is not trusted; returns what is wrong with it, None for nothing."""
        problem = None
        if self._state is None:
            problem = "nothing says what wrote it"
        else:
            problem = lmdb_check.verdict(self._folder, _CHECK_SECONDS)
        if problem is None and quarantine:
            return None
        if problem is None:
            # A dry run changes nothing, and only who may change it opens an untrusted file.
            return (
                f"{self._folder} fits together, but was in use when the machine stopped: its "
                "frames can be verified without --dry-run only"
            )
        text = f"{self._folder / DATA} does not fit together: {problem}"
        if not quarantine:
            return f"{text}; the next start of an engine sets it aside and begins anew"
        with self._opened(create=True):
            pass
        return f"{text}; it was set aside as {SET_ASIDE}, and the store begins anew"

    @contextlib.contextmanager
    def _opened(self, *, create: bool = False) -> Iterator[LMDBAccess]:
        """Open the environment as its users do.

        Args:
            create: whether to check first a file that is not trusted, and to set it aside.
        """
        found = self._state
        capacity_nbytes = found.capacity_nbytes if found is not None else 2**20
        settings = LMDBStoreSettings(
            self._folder, capacity_nbytes, check_seconds=_CHECK_SECONDS, num_copy_threads=1
        )
        access = LMDBAccess(settings, create=create)
        try:
            with _said(self._folder):
                access.open()
                yield access
        finally:
            access.close()

    # -- frames -----------------------------------------------------------------------

    def _verify(self, access: LMDBAccess, verdict: Verdict, progress: Progress) -> None:
        checker = FrameChecker()
        last: bytes | None = b""
        while last is not None:
            with access.reading() as session:
                last, num, nbytes = _verify_some(session, last, checker, verdict.faults)
            verdict.num_good += num
            verdict.nbytes += nbytes
            progress(num, nbytes)
        verdict.num_good -= len(verdict.faults)

    def _quarantine(self, access: LMDBAccess, verdict: Verdict) -> None:
        keys = [StoreKey(bytes.fromhex(fault.key)) for fault in verdict.faults]
        checker = FrameChecker()
        for start in range(0, len(keys), _QUARANTINE_KEYS):
            part = keys[start : start + _QUARANTINE_KEYS]
            try:
                with access.writing() as session:
                    bad = [key for key in part if _fault_of(session, key, checker) is not None]
                    shelf = Shelf(session, _BATCH_FRAMES)
                    shelf.delete(bad)
                    shelf.save()
            except (KVTiersError, lmdb.Error, ValueError) as error:
                distrust(self._folder)
                verdict.problem = (
                    f"not all that is damaged could be dropped ({error}); the next user reads all "
                    "of the file first, and sets it aside"
                )
                return
            verdict.num_quarantined += len(part)

    def _num_frames(self, access: LMDBAccess) -> int:
        with access.reading() as session:
            return session.env.counters(session.txn).num_frames

    def _evict(self, access: LMDBAccess, nbytes: int) -> int:
        freed = 0

        def evict(shelf: Shelf) -> None:
            nonlocal freed
            freed = shelf.evict(nbytes)

        self._change(access, evict)
        return freed

    def _change(self, access: LMDBAccess, change: Callable[[Shelf], object]) -> None:
        try:
            with access.writing() as session:
                shelf = Shelf(session, _BATCH_FRAMES)
                change(shelf)
                shelf.save()
        except lmdb.MapFullError:
            access.open().free_stale_readers()
            with access.writing() as session:
                shelf = Shelf(session, _BATCH_FRAMES)
                change(shelf)
                shelf.save()


@contextlib.contextmanager
def _said(folder: Path) -> Iterator[None]:
    """Make what LMDB raises, or a store that is away, an error that says where."""
    try:
        yield
    except (StoreError, CapacityError):
        raise
    except (KVTiersError, lmdb.Error, OSError, ValueError) as error:
        raise StoreError(f"{folder} cannot be used now: {error}") from error


def _verify_some(
    session: Session, after: bytes, checker: FrameChecker, faults: list[Fault]
) -> tuple[bytes | None, int, int]:
    """Verify the frames after a key; returns the last one's, how many, and their bytes.

    The key is None where there is none left.
    """
    num = nbytes = 0
    last: bytes | None = None
    with session.txn.cursor(session.env.index) as cursor:
        more = cursor.set_range(after) if after else cursor.first()
        if more and after and bytes(cursor.key()) == after:
            more = cursor.next()
        while more and num < _BATCH_FRAMES and nbytes < _BATCH_NBYTES:
            last = bytes(cursor.key())
            what, size = _judge(session, StoreKey(last), cursor.value(), checker)
            if what is not None:
                faults.append(Fault(last.hex(), "data.mdb", what))
            num += 1
            nbytes += size
            more = cursor.next()
    return (last if more else None), num, nbytes


def _judge(
    session: Session, key: StoreKey, record: memoryview, checker: FrameChecker
) -> tuple[str | None, int]:
    """Return what is wrong with a frame, and how much it counts."""
    try:
        nbytes, _, prefix = unpack_index(record)
    except ValueError as error:
        return str(error), 0
    value = session.txn.get(key, None, session.env.frames)
    if value is None or len(value) != nbytes - len(prefix):
        held = -1 if value is None else len(value)
        return f"{held} bytes, its index record says {nbytes - len(prefix)}", footprint(nbytes)
    return checker.fault(key, prefix, memoryview(value)), footprint(nbytes)


def _fault_of(session: Session, key: StoreKey, checker: FrameChecker) -> str | None:
    """Return what is wrong with a frame now, None for nothing, or where it is gone."""
    record = session.txn.get(key, None, session.env.index)
    if record is None:
        return None
    return _judge(session, key, memoryview(record), checker)[0]
