"""A gate that many may be inside of, and that one may empty."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Keeps count of who uses something that must be moved when nobody does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._emptying = False

    def enter(self) -> None:
        """Go in, once nobody empties the gate."""
        with self._changed:
            while self._emptying:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        """Go out."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def emptied(self, seconds: float) -> Iterator[bool]:
        """Keep others out and wait for those inside; yields whether all have left in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._emptying:
                self._changed.wait()
            self._emptying = True
            while self._inside and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            empty = not self._inside
        try:
            yield empty
        finally:
            with self._changed:
                self._emptying = False
                self._changed.notify_all()
