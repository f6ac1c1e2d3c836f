"""A store whose reads take as long as on a slower medium."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvtiers.data.store import BlockStore, FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.keys import StoreKey


class ThrottledStore:
    """Withholds the answer to each read until its bytes could have come, one read after another.

    Writes pass as fast as they are: what is measured is a reload. The frames of a batch are in
    their slots before its answer is given; nobody may look at them before.

    Args:
        bytes_per_second: of all reads together, headers included; > 0.
        clock: seconds; never runs backwards.
    """

    def __init__(
        self,
        inner: BlockStore,
        bytes_per_second: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a store of {bytes_per_second} bytes/s never answers")
        self._inner = inner
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._busy_until = 0.0
        self._due: dict[StoreTicket, tuple[float, float]] = {}  # when it is, and seconds at work
        self._early: list[StoreAnswer] = []

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on."""
        return self._inner.put(frames)

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on, and note when the answer is due."""
        ticket = self._inner.get(frames)
        seconds = sum(frame.nbytes for frame in frames) / self._bytes_per_second
        self._busy_until = max(self._busy_until, self._clock()) + seconds
        self._due[ticket] = self._busy_until, seconds
        return ticket

    def poll(self) -> list[StoreAnswer]:
        """Return the answers that are due."""
        now = self._clock()
        answers = []
        early, self._early = self._early, []
        for answer in early + self._inner.poll():
            due_at, seconds = self._due.get(answer.ticket, (now, 0.0))
            if due_at > now:
                self._early.append(answer)
                continue
            self._due.pop(answer.ticket, None)
            answers.append(replace(answer, seconds=max(answer.seconds, seconds)))
        return answers

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Pass on."""
        self._inner.delete(keys)

    def keys(self) -> list[StoreKey]:
        """Pass on."""
        return self._inner.keys()

    def retire(self) -> None:
        """Pass on."""
        self._inner.retire()

    def close(self) -> None:
        """Pass on; answers that were withheld can still be polled."""
        self._inner.close()
