"""The reference store: frames in unpinned host memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.errors import CapacityError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome


class MemoryStore:
    """Frames as ``bytes`` in a dictionary, up to a number of bytes; works within the call.

    What it does is what every other store must do: the conformance suite is written
    against it.
    """

    def __init__(self, slab: Slab, capacity_nbytes: int) -> None:
        """Make an empty store.

        Raises:
            CapacityError: the capacity is not positive.
        """
        if capacity_nbytes < 1:
            raise CapacityError(f"memory store of {capacity_nbytes} bytes; needs at least 1")
        self._slab = slab
        self._capacity_nbytes = capacity_nbytes
        self._frames: dict[StoreKey, bytes] = {}
        self._used_nbytes = 0
        self._tickets = itertools.count(1)
        self._answers: list[StoreAnswer] = []

    @property
    def used_nbytes(self) -> int:
        """Bytes of all frames held."""
        return self._used_nbytes

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Copy frames out of the slab."""
        started = time.perf_counter()
        outcomes, held = [], set()
        for row, frame in enumerate(frames):
            if frame.key in self._frames:
                held.add(row)
            outcomes.append(self._put(frame))
        return self._answer(outcomes, started, frozenset(held))

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Copy frames into the slab."""
        started = time.perf_counter()
        return self._answer([self._get(frame) for frame in frames], started)

    def poll(self) -> list[StoreAnswer]:
        """Return the batches answered since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Drop frames."""
        for key in keys:
            self._used_nbytes -= len(self._frames.pop(key, b""))

    def keys(self) -> list[StoreKey]:
        """Return the keys of all frames."""
        return list(self._frames)

    def retire(self) -> None:
        """Drop every frame."""
        self._frames.clear()
        self._used_nbytes = 0

    def close(self) -> None:
        """Drop every frame; nothing outlives the process anyway."""
        self.retire()

    def _put(self, frame: FrameRef) -> Outcome:
        if frame.key in self._frames:
            return Outcome.OK
        if self._used_nbytes + frame.nbytes > self._capacity_nbytes:
            return Outcome.FULL
        self._frames[frame.key] = bytes(self._slab.view(frame.slot)[: frame.nbytes])
        self._used_nbytes += frame.nbytes
        return Outcome.OK

    def _get(self, frame: FrameRef) -> Outcome:
        held = self._frames.get(frame.key)
        if held is None:
            return Outcome.MISSING
        if len(held) != frame.nbytes:
            return Outcome.CORRUPT
        self._slab.view(frame.slot)[: frame.nbytes] = held
        return Outcome.OK

    def _answer(
        self, outcomes: list[Outcome], started: float, held: frozenset[int] = frozenset()
    ) -> StoreTicket:
        ticket = StoreTicket(next(self._tickets))
        seconds = time.perf_counter() - started
        self._answers.append(StoreAnswer(ticket, tuple(outcomes), seconds, held))
        return ticket
