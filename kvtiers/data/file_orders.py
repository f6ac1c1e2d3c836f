"""Orders to the process that owns a file store, left in its folder by the command line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

from kvtiers.model.errors import StoreError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey
from kvtiers.observe.files import sweep

_logger = logging.getLogger(__name__)

ORDER: Final = "order.json"  # waits for the owner
TAKEN: Final = "order.taken"  # the owner is at it
VERSION: Final = 1
MAX_KEYS: Final = 10_000  # of one order
LOOK_SECONDS: Final = 0.25  # between two looks of the owner; one costs 2 us
_MAX_NBYTES: Final = 2**20


class Verb(Enum):
    """What is to be done."""

    CLEAR = "clear"  # drop every frame
    EVICT = "evict"  # keep only so many frames, the youngest
    DELETE = "delete"  # drop these frames


@dataclass(frozen=True, slots=True)
class Order:
    """One order.

    Attributes:
        expires: Unix time from which on it is not carried out any more.
        keep_frames: of EVICT. keys: of DELETE, at most `MAX_KEYS`.
    """

    verb: Verb
    expires: float
    keep_frames: int = 0
    keys: tuple[StoreKey, ...] = ()

    def encode(self) -> bytes:
        """Return the file's text."""
        plain = {
            "version": VERSION,
            "verb": self.verb.value,
            "expires": self.expires,
            "keep_frames": self.keep_frames,
            "keys": [key.hex() for key in self.keys],
        }
        return json.dumps(plain).encode() + b"\n"

    @classmethod
    def decode(cls, text: bytes) -> Order:
        """Read a file's text.

        Raises:
            ValueError: it is no order of this version.
        """
        try:
            plain: Any = json.loads(text)
        except RecursionError as error:
            raise ValueError(str(error)) from error
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise ValueError(f"no order of version {VERSION}")
        try:
            keys = tuple(StoreKey(bytes.fromhex(key)) for key in plain["keys"])
            order = cls(Verb(plain["verb"]), float(plain["expires"]), plain["keep_frames"], keys)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"an order without {error}") from error
        if {len(key) for key in keys} - {STORE_KEY_NBYTES}:
            raise ValueError("a key of another length")
        if not isinstance(order.keep_frames, int) or order.keep_frames < 0:
            raise ValueError(f"keep_frames {order.keep_frames!r}")
        return order


class _Store(Protocol):
    """What an order is carried out on."""

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames, those first that were put first."""
        ...

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames."""
        ...

    def clear(self) -> None:
        """Drop every frame."""
        ...


class _History(Protocol):
    """What makes an order durable: see `IndexPublisher`."""

    @property
    def num_queued(self) -> int: ...

    @property
    def num_committed(self) -> int: ...

    def want(self, number: int) -> None: ...


class OrderBox:
    """The owner's side: looks for an order, carries it out, and answers when that is durable.

    The answer is that the order's file is gone. An order that a killed owner had begun is
    begun again by the next one.

    Args:
        folder: of the rank. history: tells when what was done is durable.
    """

    def __init__(
        self, folder: Path, history: _History, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._order, self._taken = folder / ORDER, folder / TAKEN
        self._history = history
        self._clock = clock
        self._next_look = float("-inf")
        self._change: int | None = None  # that ends what has been carried out
        sweep(folder.glob(f"{ORDER}.*.tmp"))

    def attend(self, store: _Store) -> None:
        """Look for an order, unless that was done lately; never waits, never raises."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._change is not None:
            self._answer()
            return
        order = self._take()
        if order is None:
            return
        _carry_out(order, store)
        self._change = self._history.num_queued
        self._history.want(self._change)

    def close(self) -> None:
        """Answer what has become durable by the end; idempotent."""
        if self._change is not None:
            self._answer()

    def _answer(self) -> None:
        if self._change is not None and self._history.num_committed >= self._change:
            self._change = None
            with contextlib.suppress(OSError):
                self._taken.unlink()

    def _take(self) -> Order | None:
        if not self._taken.exists():
            if not self._order.exists():
                return None
            try:
                self._order.rename(self._taken)
            except OSError:  # it was withdrawn just now
                return None
        try:
            order = Order.decode(_read(self._taken))
            if order.expires < time.time():
                raise ValueError("its time is over")
        except (OSError, ValueError) as error:
            _logger.warning("%s is not carried out: %s", self._order, error)
            with contextlib.suppress(OSError):
                self._taken.unlink()
            return None
        return order


def _carry_out(order: Order, store: _Store) -> None:
    if order.verb is Verb.CLEAR:
        store.clear()
        _logger.warning("every frame was dropped, as the command line has ordered")
        return
    keys = list(order.keys)
    if order.verb is Verb.EVICT:
        held = store.keys()
        keys = held[: max(0, len(held) - order.keep_frames)]
    store.delete(keys)
    _logger.warning("%d frames were dropped, as the command line has ordered", len(keys))


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        text = os.read(fd, _MAX_NBYTES)
    finally:
        os.close(fd)
    return text


# -- the side of who orders -----------------------------------------------------------


def leave_order(folder: Path, order: Order) -> None:
    """Put an order where the owner finds it, whole or not at all.

    Raises:
        StoreError: another order waits there, or the folder cannot be written.
    """
    draft = folder / f"{ORDER}.{os.getpid()}.tmp"
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, order.encode())
        finally:
            os.close(fd)
        if (folder / TAKEN).exists():
            raise FileExistsError
        (folder / ORDER).hardlink_to(draft)  # unlike a rename, this replaces no other one
    except FileExistsError:
        raise StoreError(
            f"another order waits for the owner of {folder}; try again when that is done, or "
            f"remove {folder / ORDER}"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot write an order into {folder}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


def is_answered(folder: Path) -> bool:
    """Whether no order waits or is being carried out."""
    return not (folder / ORDER).exists() and not (folder / TAKEN).exists()


def withdraw_order(folder: Path) -> bool:
    """Take an order back; False if the owner has begun with it."""
    try:
        (folder / ORDER).unlink()
    except FileNotFoundError:
        return False
    return True


def forget_orders(folder: Path) -> None:
    """Remove what lies there; only for who owns the folder."""
    for path in (folder / ORDER, folder / TAKEN, *folder.glob(f"{ORDER}.*.tmp")):
        path.unlink(missing_ok=True)
