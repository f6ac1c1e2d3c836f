"""Wrappers around a store that make it fail, answer late, or answer out of order."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore, FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome


class WrapperStore:
    """Passes every call on to another store."""

    def __init__(self, inner: BlockStore) -> None:
        self.inner = inner

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on."""
        return self.inner.put(frames)

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on."""
        return self.inner.get(frames)

    def poll(self) -> list[StoreAnswer]:
        """Pass on."""
        return self.inner.poll()

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Pass on."""
        self.inner.delete(keys)

    def keys(self) -> list[StoreKey]:
        """Pass on."""
        return self.inner.keys()

    def retire(self) -> None:
        """Pass on."""
        self.inner.retire()

    def close(self) -> None:
        """Pass on."""
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Flip:
    """A fault of a get: the frames arrive, each with one byte changed.

    Attributes:
        offset: of the byte in the frame. mask: what it is xor-ed with, not 0.
    """

    offset: int
    mask: int = 0xFF


Fault = Exception | Outcome | Flip


class FaultyStore(WrapperStore):
    """Fails chosen calls, counted from 1 for each verb.

    An exception is raised. An `Outcome` is answered for every frame of a put or get, without
    a byte moved. A `Flip` spoils what a get brings.
    """

    def __init__(self, inner: BlockStore, slab: Slab) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self._slab = slab
        self._faults: dict[tuple[str, int], Fault] = {}
        self._forged: list[StoreAnswer] = []
        self._forged_ids = itertools.count(-1, -1)
        self._flips: dict[StoreTicket, tuple[Flip, Sequence[FrameRef]]] = {}

    def fail(self, verb: str, fault: Fault, *, on: int | None = None) -> None:
        """Let the next call of a verb fail, or the one with number `on`."""
        self._faults[verb, self.calls[verb] + 1 if on is None else on] = fault

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on, or fail."""
        fault = self._fault("put")
        if isinstance(fault, Outcome):
            return self._forge(fault, frames)
        return self.inner.put(frames)

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Pass on, or fail."""
        fault = self._fault("get")
        if isinstance(fault, Outcome):
            return self._forge(fault, frames)
        ticket = self.inner.get(frames)
        if isinstance(fault, Flip):
            self._flips[ticket] = fault, tuple(frames)
        return ticket

    def poll(self) -> list[StoreAnswer]:
        """Pass on, or fail."""
        self._fault("poll")
        answers = self.inner.poll()
        for answer in answers:
            if answer.ticket in self._flips:
                flip, frames = self._flips.pop(answer.ticket)
                for frame in frames:
                    self._slab.view(frame.slot)[flip.offset] ^= flip.mask
        forged, self._forged = self._forged, []
        return answers + forged

    def delete(self, keys: Iterable[StoreKey]) -> None:
        """Pass on, or fail."""
        self._fault("delete")
        self.inner.delete(keys)

    def retire(self) -> None:
        """Pass on, or fail."""
        self._fault("retire")
        self.inner.retire()

    def close(self) -> None:
        """Pass on, or fail."""
        self._fault("close")
        self.inner.close()

    def _fault(self, verb: str) -> Fault | None:
        self.calls[verb] += 1
        fault = self._faults.pop((verb, self.calls[verb]), None)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def _forge(self, outcome: Outcome, frames: Sequence[FrameRef]) -> StoreTicket:
        ticket = StoreTicket(next(self._forged_ids))
        self._forged.append(StoreAnswer(ticket, (outcome,) * len(frames), 0.0))
        return ticket


class LateStore(WrapperStore):
    """Withholds each answer for some polls, and hands those that are due out in random order.

    Args:
        polls: how many polls an answer is late. seed: of the order; None keeps it.
    """

    def __init__(self, inner: BlockStore, polls: int = 3, seed: int | None = None) -> None:
        super().__init__(inner)
        self._polls = polls
        self._random = None if seed is None else random.Random(seed)
        self._waiting: list[tuple[int, StoreAnswer]] = []
        self._num_polls = 0

    def poll(self) -> list[StoreAnswer]:
        """Return what is due."""
        self._num_polls += 1
        due_at = self._num_polls + self._polls
        self._waiting += [(due_at, answer) for answer in self.inner.poll()]
        due = [answer for at, answer in self._waiting if at <= self._num_polls]
        self._waiting = [(at, answer) for at, answer in self._waiting if at > self._num_polls]
        if self._random is not None:
            self._random.shuffle(due)
        return due


class HeldStore(WrapperStore):
    """Holds batches until a test releases them; a frame moves at that moment, not before.

    Deletions overtake the batches that are held. The inner store must work within the call.
    Another thread than the store's may release.
    """

    def __init__(self, inner: BlockStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._held: deque[tuple[StoreTicket, bool, Sequence[FrameRef]]] = deque()
        self._tickets = itertools.count(1)
        self._answers: list[StoreAnswer] = []

    @property
    def num_held(self) -> int:
        """Batches that nobody has released."""
        return len(self._held)

    @property
    def held_frames(self) -> list[Sequence[FrameRef]]:
        """The frames of those batches, oldest first."""
        return [frames for _, _, frames in self._held]

    @property
    def held_slots(self) -> set[int]:
        """Slots of those batches."""
        return {frame.slot for frames in self.held_frames for frame in frames}

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Hold."""
        return self._hold(frames, writes=True)

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Hold."""
        return self._hold(frames, writes=False)

    def poll(self) -> list[StoreAnswer]:
        """Return the answers to what was released."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def release(self, num: int | None = None, *, newest_first: bool = False) -> int:
        """Let held batches happen, all of them unless limited; returns how many."""
        with self._lock:
            num = len(self._held) if num is None else min(num, len(self._held))
            for _ in range(num):
                ticket, writes, frames = self._held.pop() if newest_first else self._held.popleft()
                (self.inner.put if writes else self.inner.get)(frames)
                self._answers += [replace(answer, ticket=ticket) for answer in self.inner.poll()]
        return num

    def close(self) -> None:
        """Release everything, and pass on."""
        self.release()
        self.inner.close()

    def _hold(self, frames: Sequence[FrameRef], *, writes: bool) -> StoreTicket:
        ticket = StoreTicket(next(self._tickets))
        self._held.append((ticket, writes, tuple(frames)))
        return ticket


class ThrottledStore(WrapperStore):
    """Answers reads no faster than a medium of some bandwidth would; writes pass as they are.

    The inner store must work within the call. Bytes are in the slots at once, but the answer,
    which gives them back, comes when the medium would be done: one batch after another.

    Attributes:
        bytes_per_second: may be changed at any time, by another thread too; batches that were
            submitted before keep their time.
    """

    def __init__(
        self,
        inner: BlockStore,
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._clock = clock
        self._free_at = 0.0
        self._held: deque[tuple[float, StoreAnswer]] = deque()  # when it is due
        self._others: list[StoreAnswer] = []

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Read, and hold the answer."""
        began = max(self._free_at, self._clock())
        ticket = self.inner.get(frames)
        nbytes = sum(frame.nbytes for frame in frames)
        seconds = self._latency_seconds + nbytes / self.bytes_per_second
        self._free_at = began + seconds
        for answer in self.inner.poll():
            if answer.ticket == ticket:
                self._held.append((self._free_at, replace(answer, seconds=seconds)))
            else:
                self._others.append(answer)
        return ticket

    def poll(self) -> list[StoreAnswer]:
        """Return what is due."""
        now = self._clock()
        due, self._others = [*self._others, *self.inner.poll()], []
        while self._held and self._held[0][0] <= now:
            due.append(self._held.popleft()[1])
        return due
