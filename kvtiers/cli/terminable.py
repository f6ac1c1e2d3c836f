"""Lets SIGTERM end a verb as Ctrl-C does: it tells what it has, and removes what it made."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM; to be used on the main thread."""

    def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
