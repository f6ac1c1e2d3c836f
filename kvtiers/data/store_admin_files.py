"""Looking after one file store, stopped or running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import lmdb

from kvtiers.data.disk_check import describe_mount
from kvtiers.data.file_folder import OwnedFolder, lock_of
from kvtiers.data.file_index import FORMAT, FileIndex, IndexChange
from kvtiers.data.file_orders import (
    MAX_KEYS,
    Order,
    Verb,
    forget_orders,
    is_answered,
    leave_order,
    withdraw_order,
)
from kvtiers.data.file_owner import Owner, owner_of
from kvtiers.data.file_settings import FILE_HEADER_NBYTES, spare_slots
from kvtiers.data.generation_file import recorded_generations
from kvtiers.data.index_check import index_problem
from kvtiers.data.slab_file import slab_mark, slab_path
from kvtiers.data.store_admin_index import DamagedIndexError, IndexView, damaged, index_of
from kvtiers.data.store_admin_read import Keyed
from kvtiers.data.store_admin_values import (
    Dropped,
    Fault,
    Progress,
    StoreStat,
    UnansweredError,
    Verdict,
)
from kvtiers.data.store_admin_verify import FileVerifier
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import StoreKey

_POLL_SECONDS: Final = 0.02
_COMMIT_KEYS: Final = 2**16  # of one transaction

_Victims = Callable[[IndexView], Iterable[StoreKey]]


class FileStoreAdmin:
    """A file store, by its folders.

    Args:
        folders: by the number of the file in them; the index is in that of 0.
        all_named: whether somebody has named all paths of the store, as far as he knows.
        patience_seconds: how long to wait for the process that owns it.
    """

    def __init__(
        self, folders: Mapping[int, Path], patience_seconds: float, *, all_named: bool
    ) -> None:
        self._patience_seconds = patience_seconds
        self._folders = dict(folders)
        self._folder = self._folders[0]
        self._all_named = all_named
        self._walked = False  # through the whole index

    @property
    def name(self) -> str:
        """The folder of the index."""
        return str(self._folder)

    @property
    def used_nbytes(self) -> int:
        """What `evict` counts: the slots in use."""
        with self._view() as view:
            return view.num_frames * view.slot_nbytes

    def stat(self) -> StoreStat:
        """Say what it is and holds; what is wrong with it is its `problem`."""
        known: dict[str, int] = {}
        problem = None
        try:
            with self._view() as view:
                problem = self._missing(view)
                num_slots = self._num_slots(view)
                num_fitting = num_slots - spare_slots(num_slots, view.slot_nbytes)
                num_frames = view.num_frames
                known = {
                    "format_version": FORMAT,
                    "num_frames": num_frames,
                    "used_nbytes": num_frames * view.slot_nbytes,
                    "capacity_nbytes": num_fitting * view.slot_nbytes,
                    "num_slots": num_fitting,
                    "num_free": max(0, num_fitting - num_frames),
                    "slot_nbytes": view.slot_nbytes,
                }
        except StoreError as error:
            problem = str(error)
        generations: dict[str, int] = {}
        try:
            generations = recorded_generations(self._folder.parent)
        except StoreError as error:
            problem = problem or str(error)
        return StoreStat(
            kind="nvme",
            name=self.name,
            paths=tuple(str(folder) for _, folder in sorted(self._folders.items())),
            filesystem=describe_mount(self._folder).fs_type,
            owner=self._owner(),
            generations=generations,
            problem=problem,
            disk_nbytes=self._disk_nbytes(),
            changed_seconds_ago=self._changed_seconds_ago(),
            **known,
        )

    def num_to_verify(self) -> tuple[int, int]:
        """Return how many frames there are, and their bytes; none if the index is damaged."""
        try:
            with self._view() as view:
                records = view.records()
        except DamagedIndexError:
            return 0, 0
        return len(records), sum(record.nbytes for _, record in records)

    def verify(self, progress: Progress, *, quarantine: bool) -> Verdict:
        """Read every frame, and see to it that what is damaged is never served.

        Args:
            progress: told of each piece. quarantine: whether to drop what is damaged.

        Raises:
            StoreError: it is of another format, or not all of its paths are named.
        """
        started = time.perf_counter()
        verdict = Verdict(self.name)
        bad: list[tuple[Keyed, str]] = []
        try:
            with self._view() as view:
                missing = self._missing(view)
                if missing is not None and not self._all_named:
                    raise StoreError(missing)
                findings = FileVerifier(view, self._marked(view)).run(progress)
                verdict.num_good, verdict.num_gone = findings.num_good, findings.num_gone
                verdict.nbytes, bad = findings.nbytes, findings.bad
        except DamagedIndexError as error:
            verdict.problem = str(error)
        for (key, record), what in bad:
            folder = self._folders.get(record.file_idx)
            file = str(slab_path(folder)) if folder else f"file {record.file_idx}"
            verdict.faults.append(Fault(key.hex(), f"{file}, slot {record.slot}", what))
        if quarantine and bad:
            try:
                self._quarantine([keyed for keyed, _ in bad])
                verdict.num_quarantined = len(bad)
            except StoreError as error:
                verdict.problem = f"not all that is damaged is quarantined: {error}"
        verdict.seconds = time.perf_counter() - started
        return verdict

    def clear(self) -> Dropped:
        """Drop every frame, and begin a new generation of the index.

        Raises:
            UnansweredError: the owner has not done it in time. StoreError: it cannot be done.
        """
        return self._counted(lambda: self._do(Order(Verb.CLEAR, 0.0), None))

    def evict(self, nbytes: int) -> Dropped:
        """Drop the frames that were put first, until the slots in use are no more than so many.

        Raises:
            StoreError: see `clear`.
        """
        with self._view() as view:
            keep = nbytes // view.slot_nbytes

        def oldest(view: IndexView) -> list[StoreKey]:
            records = sorted(view.records(), key=lambda keyed: keyed[1].sequence)
            return [key for key, _ in records[: max(0, len(records) - keep)]]

        order = Order(Verb.EVICT, 0.0, keep_frames=keep)
        return self._counted(lambda: self._do(order, oldest))

    # -- what it is -------------------------------------------------------------------

    def _owner(self) -> Owner | None:
        try:
            return owner_of(lock_of(self._folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"cannot open {lock_of(self._folder)}: {error.strerror}; run as the user whose "
                "store it is"
            ) from error

    def _view(self) -> IndexView:
        """Open the index; one that nobody uses is walked through first: damage kills readers."""
        if not self._walked and self._owner() is None:
            try:
                problem = index_problem(index_of(self._folder))
            except OSError as error:
                raise StoreError(
                    f"cannot read {index_of(self._folder)}: {error.strerror}"
                ) from error
            if problem is not None and self._owner() is None:
                raise damaged(index_of(self._folder), problem)
            self._walked = True
        return IndexView(self._folder)

    def _marked(self, view: IndexView) -> dict[int, Path]:
        """Return the folders whose files are those of the index."""
        marked = {}
        for idx, folder in self._folders.items():
            with contextlib.suppress(OSError):
                mark = slab_mark(slab_path(folder))
                if mark is not None and (mark.file_idx, mark.slot_nbytes, mark.store_id) == (
                    idx,
                    view.slot_nbytes,
                    view.store_id,
                ):
                    marked[idx] = folder
        return marked

    def _missing(self, view: IndexView) -> str | None:
        """Return which files of the store are not there, None for none."""
        absent = sorted(set(range(view.num_files)) - self._marked(view).keys())
        if not absent:
            return None
        numbers = " and ".join(str(idx + 1) for idx in absent)
        if len(absent) < view.num_files and not self._all_named:
            return (
                f"{self._folder} is striped over {view.num_files} paths: name all of them, in the "
                f"order of the configuration; number {numbers} is not among those named"
            )
        return (
            f"{self._folder}: the slab file on path {numbers} of {view.num_files} is gone, or has "
            "not the mark of this store; the next start of the engine drops its frames"
        )

    def _num_slots(self, view: IndexView) -> int:
        sizes = [slab_path(folder).stat().st_size for folder in self._marked(view).values()]
        return sum(max(0, size - FILE_HEADER_NBYTES) // view.slot_nbytes for size in sizes)

    def _files(self) -> list[Path]:
        slabs = [slab_path(folder) for folder in self._folders.values()]
        found = [*slabs, *index_of(self._folder).glob("*.mdb")]
        return [path for path in found if path.is_file()]

    def _disk_nbytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self._files())

    def _changed_seconds_ago(self) -> float | None:
        times = [path.stat().st_mtime for path in self._files() if path.name != "lock.mdb"]
        return max(0.0, time.time() - max(times)) if times else None

    # -- what is changed --------------------------------------------------------------

    def _quarantine(self, bad: Sequence[Keyed]) -> None:
        for start in range(0, len(bad), MAX_KEYS):
            part = bad[start : start + MAX_KEYS]

            def still_there(view: IndexView, part: Sequence[Keyed] = part) -> list[StoreKey]:
                return [key for key, _ in view.still_there(part)]

            order = Order(Verb.DELETE, 0.0, keys=tuple(key for key, _ in part))
            self._do(order, still_there)

    def _counted(self, change: Callable[[], bool]) -> Dropped:
        with self._view() as view:
            before = view.num_frames
        by_owner = change()
        with self._view() as view:
            after = view.num_frames
        return Dropped(self.name, max(0, before - after), after, by_owner)

    def _do(self, order: Order, victims: _Victims | None) -> bool:
        """Have an order carried out by the owner, or carry it out where there is none.

        Args:
            victims: which frames that means now; None for all.

        Returns:
            whether it was the owner.
        """
        deadline = time.monotonic() + self._patience_seconds
        while True:
            owner = self._owner()
            if owner is not None:
                if self._by_owner(order, owner, deadline):
                    return True
                continue  # it has gone
            try:
                with contextlib.closing(OwnedFolder(self._folder)):
                    forget_orders(self._folder)
                    self._directly(victims)
            except StoreError:
                if self._owner() is None or time.monotonic() > deadline:
                    raise
            else:
                return False

    def _directly(self, victims: _Victims | None) -> None:
        """Change the index of a store that is owned by us now."""
        with IndexView(self._folder) as view:
            shape = (view.num_files, view.slot_nbytes, view.map_nbytes)
            keys = [] if victims is None else list(victims(view))
        index = FileIndex(self._folder, *shape)
        try:
            if victims is None:
                index.commit([IndexChange(None, generation=index.generation + 1)])
            for start in range(0, len(keys), _COMMIT_KEYS):
                index.commit([IndexChange(key) for key in keys[start : start + _COMMIT_KEYS]])
        except lmdb.Error as error:
            raise StoreError(
                f"cannot write the index {index.path}: {error}; free space on its disk"
            ) from error
        finally:
            index.close()

    def _by_owner(self, order: Order, owner: Owner, deadline: float) -> bool:
        """Leave an order and wait until it is durable; False if the owner ends meanwhile.

        Raises:
            UnansweredError: it does not come in time. StoreError: it cannot be left.
        """
        patience = deadline - time.monotonic()
        dated = Order(order.verb, time.time() + max(0.0, patience), order.keep_frames, order.keys)
        leave_order(self._folder, dated)
        while not is_answered(self._folder):
            if self._owner() is None:
                return False
            if time.monotonic() > deadline:
                taken_back = withdraw_order(self._folder)
                if is_answered(self._folder) and not taken_back:
                    return True
                fate = (
                    "it has not begun with it, and the order is withdrawn"
                    if taken_back
                    else "it has begun, but its disk has not confirmed it"
                )
                raise UnansweredError(
                    f"{owner} holds {self._folder}, and has not carried the order out in time: "
                    f"{fate}; try again with more --patience, or stop it first"
                )
            time.sleep(_POLL_SECONDS)
        return True
