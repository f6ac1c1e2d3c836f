"""What stores hold that control did not write, looked up beside it on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import lmdb
import numpy as np

from kvtiers.data.inventory import Inventory
from kvtiers.data.key_space import KeySpace
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.model.errors import KVTiersError
from kvtiers.model.keys import KEY_NBYTES, BlockKey, StoreKey, unpack_keys
from kvtiers.model.messages import NOT_LOOKED_UP, Lookup, Presence, UInt8s

logger = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0  # many times what the longest piece takes
PIECE_KEYS: Final = 256  # of one transaction and one answer: about 1 ms


@dataclass(slots=True)
class _Question:
    """A lookup, and how far it has come."""

    lookup: Lookup
    asked: float
    start: int = 0  # bytes of the key column that are answered


class IndexReader:
    """Answers `Lookup` by `Presence`: a key is present if a store holds every rank's frame of it.

    Lookups take turns, a piece of each at a time, and every piece is answered as soon as it is
    known, so that a long one delays no other. What is not looked up in time is answered as that, so
    that it may be asked again; everything of a store that is away is absent. A lookup always has
    all its answers in the end.

    It only reads, and notes no access. Give it settings, not stores: it lives in the scheduler's
    process, and shares the environment with a store that happens to be in the same.

    Args:
        settings: of each shared store, by the name that control has for it.
        key_spaces: of all ranks. inventories: of private stores, by name.
        lookup_seconds: how long a lookup may take from `ask` on: longer than anybody waits.
        clock: seconds.

    Raises:
        ValueError: there are no key spaces.
    """

    def __init__(
        self,
        settings: Mapping[str, LMDBStoreSettings],
        key_spaces: Sequence[KeySpace],
        *,
        inventories: Mapping[str, Inventory] | None = None,
        lookup_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not key_spaces:
            raise ValueError("no key spaces: of no rank every frame is there")
        self._accesses = {
            name: LMDBAccess(found, create=False, clock=clock) for name, found in settings.items()
        }
        self._key_spaces = tuple(key_spaces)
        self._inventories = dict(inventories or {})
        self._lookup_seconds = lookup_seconds
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: deque[_Question | int] = deque()  # an int: a new generation
        self._answers: deque[Presence] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kvtiers-index", daemon=True)
        self._thread.start()

    def ask(self, lookup: Lookup) -> None:
        """Queue a lookup; returns at once.

        Raises:
            ValueError: the key column has no whole number of keys.
        """
        if len(lookup.keys) % KEY_NBYTES:
            raise ValueError(
                f"key column has {len(lookup.keys)} bytes, no multiple of {KEY_NBYTES}"
            )
        self._post(_Question(lookup, self._clock()))

    def enter(self, generation: int) -> None:
        """Name the keys of later lookups in another generation; returns at once."""
        self._post(generation)

    def answers(self) -> list[Presence]:
        """Return the answers since the last call; never waits."""
        answers: list[Presence] = []
        while self._answers:  # only this caller takes
            answers.append(self._answers.popleft())
        return answers

    def close(self) -> None:
        """Stop, without the answers that are still due; idempotent.

        A thread that hangs in a store is left behind, with what it reads.
        """
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            stores = ", ".join((*self._accesses, *self._inventories))
            logger.warning(
                "%s: a lookup does not end, %g s after it was told to", stores, _CLOSE_SECONDS
            )
            return
        for access in self._accesses.values():
            access.close()

    # -- the thread -------------------------------------------------------------------

    def _post(self, item: _Question | int) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify_all()

    def _serve(self) -> None:
        while not self._closed:
            item = self._next()
            try:
                self._turn(item)
            except Exception:  # thread top: a lookup that fails must not end the others
                stores = ", ".join((*self._accesses, *self._inventories))
                logger.exception("%s: a look into the index failed", stores)
                if isinstance(item, _Question):
                    self._answer_rest(item, 0)

    def _turn(self, item: _Question | int | None) -> None:
        if item is None:
            for access in self._accesses.values():
                access.check()
        elif isinstance(item, int):
            for space in self._key_spaces:
                space.enter(item)
        else:
            self._advance(item)

    def _next(self) -> _Question | int | None:
        """Wait for what is asked; None if it is nothing for a while, or no longer."""
        with self._wake:
            if not self._inbox and not self._closed:
                self._wake.wait(_IDLE_SECONDS)
            return self._inbox.popleft() if self._inbox else None

    def _advance(self, question: _Question) -> None:
        """Answer one piece of a lookup, and put the rest at the end of the queue."""
        if self._clock() > question.asked + self._lookup_seconds:
            self._answer_rest(question, NOT_LOOKED_UP)
            return
        column = question.lookup.keys
        end = min(len(column), question.start + PIECE_KEYS * KEY_NBYTES)
        piece = column[question.start : end]
        self._answer(question, piece, self._present(question.lookup.store, piece))
        if question.start < len(column):
            with self._wake:
                self._put_back(question)

    def _put_back(self, question: _Question) -> None:
        """Queue the rest of a lookup behind others, but before a new generation: it is older."""
        before = next((i for i, x in enumerate(self._inbox) if isinstance(x, int)), None)
        self._inbox.insert(len(self._inbox) if before is None else before, question)

    def _present(self, store: str, piece: bytes) -> UInt8s:
        """Return one flag per key."""
        keys = list(unpack_keys(piece))
        inventory = self._inventories.get(store)
        if inventory is not None:
            return inventory.present(self._names(keys))
        access = self._accesses.get(store)
        if access is not None and keys:
            try:
                return self._look_up(access, keys)
            except (KVTiersError, OSError, lmdb.Error) as error:
                logger.debug("%s answers nothing: %s", store, error)
        return np.zeros(len(keys), np.uint8)

    def _look_up(self, access: LMDBAccess, keys: Sequence[BlockKey]) -> UInt8s:
        names = self._names(keys)
        with access.reading() as session, session.txn.cursor(session.env.index) as cursor:
            flags = [all(map(cursor.set_key, of_ranks)) for of_ranks in names]
        return np.asarray(flags, np.uint8)

    def _names(self, keys: Sequence[BlockKey]) -> list[list[StoreKey]]:
        return [[space.name(key) for space in self._key_spaces] for key in keys]

    def _answer_rest(self, question: _Question, flag: int) -> None:
        rest = question.lookup.keys[question.start :]
        self._answer(question, rest, np.full(len(rest) // KEY_NBYTES, flag, np.uint8))

    def _answer(self, question: _Question, piece: bytes, flags: UInt8s) -> None:
        question.start += len(piece)
        lookup = question.lookup
        if piece:
            seconds = self._clock() - question.asked
            self._answers.append(Presence(lookup.store, piece, flags, lookup.epoch, seconds))
