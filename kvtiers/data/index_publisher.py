"""A thread that makes the history of a file store durable, a little behind and in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvtiers.data.file_index import FileIndex, IndexChange
from kvtiers.data.slab_file import SlabFile

_logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0


class IndexPublisher:
    """Commits changes to the index, after the frames that they name are on the disk.

    One round: sync the files that got frames, then commit. So no power cut leaves a record
    whose frame was not written. A round waits a little for company, unless a slot is wanted
    whose record is still there: such a slot is written only after the record is gone.
    If a commit fails it is tried again; nothing that hangs on it happens meanwhile. If a
    sync fails, the frames it was for are never published.

    Args:
        index: written by this thread only, from now on. files: of the store.
        delay_seconds: how long a round waits for company.
    """

    def __init__(self, index: FileIndex, files: Sequence[SlabFile], delay_seconds: float) -> None:
        self._index = index
        self._files = files
        self._delay_seconds = delay_seconds
        self._wake = threading.Condition()
        self._queue: list[IndexChange] = []
        self._num_queued = 0  # in all
        self._num_committed = 0
        self._urgent = 0  # a round is wanted at once while fewer than so many are committed
        self._closing = False
        self._failed = False
        self._num_unsynced = 0
        self._thread = threading.Thread(target=self._run, name="kvtiers-index", daemon=True)
        self._thread.start()

    @property
    def num_committed(self) -> int:
        """Changes that are durable."""
        return self._num_committed

    @property
    def num_queued(self) -> int:
        """Changes that were ever queued: what `num_committed` reaches when all are durable."""
        return self._num_queued

    @property
    def failed(self) -> bool:
        """Whether the last commit failed; it is tried again."""
        return self._failed

    @property
    def num_unsynced(self) -> int:
        """Frames that are never published since the disk did not confirm them."""
        return self._num_unsynced

    def add(self, *changes: IndexChange) -> int:
        """Queue changes; returns the last one's number.

        `num_committed` reaches a number once its change is durable.
        """
        with self._wake:
            if not self._queue:
                self._wake.notify_all()
            self._queue += changes
            self._num_queued += len(changes)
            return self._num_queued

    def want(self, number: int) -> None:
        """Ask for a change to be made durable without delay."""
        with self._wake:
            if number > self._urgent:
                self._urgent = number
                self._wake.notify_all()

    def close(self) -> None:
        """Commit what is queued, if possible, and end the thread; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    # -- on the thread ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                self._wake.wait_for(self._hurried, self._delay_seconds)
                changes, self._queue = self._queue, []
            try:
                self._round(changes)
            except Exception:  # thread top: frames wait for a commit, or to hear that it failed
                if not self._failed:
                    _logger.exception("cannot commit %d changes to the index", len(changes))
                self._failed = True
                with self._wake:
                    if self._closing:
                        return
                    self._queue[:0] = changes
                    self._wake.wait_for(lambda: self._closing, _RETRY_SECONDS)

    def _hurried(self) -> bool:
        return self._closing or self._urgent > self._num_committed

    def _round(self, changes: list[IndexChange]) -> None:
        """Sync and commit; what raises is tried again with the same changes."""
        unsynced = self._sync({change.record.file_idx for change in changes if change.record})
        for i, change in enumerate(changes):
            if change.record is not None and change.record.file_idx in unsynced:
                changes[i] = IndexChange(change.key)  # nothing is known under this key
                self._num_unsynced += 1
        self._index.commit(changes)
        self._failed = False
        self._num_committed += len(changes)

    def _sync(self, file_idxs: set[int]) -> set[int]:
        """Sync files; returns those that failed."""
        failed = set()
        for idx in file_idxs:
            try:
                self._files[idx].sync()
            except OSError as error:
                failed.add(idx)
                _logger.error("cannot sync %s: %s", self._files[idx].path, error)
        return failed
