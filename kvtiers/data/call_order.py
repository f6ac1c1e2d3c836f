"""The order of calls on a store whose reads and writes run on different threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome


class Verb(Enum):
    """What a call does."""

    PUT = "put"
    GET = "get"
    DELETE = "delete"
    CLEAR = "clear"


@dataclass(slots=True, eq=False)
class Call:
    """One call, from its submission to its end.

    Attributes:
        verb: what it does. keys: that it concerns; a CLEAR concerns all.
        frames: of a PUT or GET. ticket: of a PUT or GET.
        outcomes, seconds, held: its answer, so far.
    """

    verb: Verb
    keys: Sequence[StoreKey] = ()
    frames: Sequence[FrameRef] = ()
    ticket: StoreTicket | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    held: frozenset[int] = frozenset()
    number: int = 0
    waits_for: int = 0  # GET: the number of the last change that it must see
    blockers: set[int] = field(default_factory=set)  # a change: reads that must not see it


class CallOrder:
    """Hands calls to a thread that changes and to threads that read.

    Changes run one after another, as submitted. A read runs once the changes of its keys
    before it are done, and a change once the reads of its keys before it are. Other reads
    overtake.

    Who cannot have become able to go on is not woken: a thread that wakes for nothing takes the
    interpreter's lock from those that copy.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._readable = threading.Condition(self._mutex)
        self._changeable = threading.Condition(self._mutex)
        self._changed = threading.Condition(self._mutex)
        self._number = 0
        self._changes: deque[Call] = deque()
        self._reads: deque[Call] = deque()
        self._running_reads: dict[int, Call] = {}  # submitted and not done
        self._last_change_of: dict[StoreKey, int] = {}
        self._last_clear = 0
        self._last_change = 0
        self._changes_done = 0
        self._closed = False

    def submit(self, call: Call) -> None:
        """Take a call; never waits for one."""
        with self._mutex:
            self._number += 1
            call.number = self._number
            if call.verb is Verb.GET:
                call.waits_for = self._last_clear
                if last := self._last_change_of:
                    changes = (last.get(key, 0) for key in call.keys)
                    call.waits_for = max(self._last_clear, max(changes, default=0))
                self._running_reads[call.number] = call
                self._reads.append(call)
                self._readable.notify()
            else:
                self._submit_change(call)
                self._changeable.notify()

    def next_changes(self, num_frames: int, seconds: float) -> list[Call] | None:
        """Wait for changes that may run now, and take them.

        Args:
            num_frames: take PUTs until they have as many; other calls come alone.
            seconds: how long to wait.

        Returns:
            The calls; none if time is over; None once closed and nothing is left.
        """
        deadline = time.monotonic() + seconds
        with self._mutex:
            while not self._changes or self._changes[0].blockers:
                if self._closed and not self._changes:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changeable.wait(left)
            calls = [self._changes.popleft()]
            while (
                calls[-1].verb is Verb.PUT
                and sum(len(call.frames) for call in calls) < num_frames
                and self._changes
                and self._changes[0].verb is Verb.PUT
                and not self._changes[0].blockers
            ):
                calls.append(self._changes.popleft())
            return calls

    def next_read(self) -> Call | None:
        """Wait for a read that may run now, and take it; None once closed and none is left."""
        with self._mutex:
            while True:
                for idx, call in enumerate(self._reads):
                    if call.waits_for <= self._changes_done:
                        del self._reads[idx]
                        return call
                if self._closed and not self._reads:
                    return None
                self._readable.wait()

    def done(self, call: Call) -> None:
        """Note the end of a call that was taken."""
        with self._mutex:
            if call.verb is Verb.GET:
                del self._running_reads[call.number]
                for change in self._changes:
                    change.blockers.discard(call.number)
                if self._changes:
                    self._changeable.notify()
            else:
                self._changes_done = call.number
                for key in call.keys:
                    if self._last_change_of.get(key) == call.number:
                        del self._last_change_of[key]
                self._readable.notify_all()
                self._changed.notify_all()

    def settle_changes(self, seconds: float) -> bool:
        """Wait for the changes submitted so far; returns whether they came to an end in time."""
        with self._mutex:
            last = self._last_change
            return self._changed.wait_for(lambda: self._changes_done >= last, seconds)

    def close(self) -> None:
        """Take no more; what was submitted still runs."""
        with self._mutex:
            self._closed = True
            self._readable.notify_all()
            self._changeable.notify_all()

    # -- internals --------------------------------------------------------------------

    def _submit_change(self, call: Call) -> None:
        keys = set(call.keys)
        everything = call.verb is Verb.CLEAR
        call.blockers = {
            number
            for number, read in self._running_reads.items()
            if everything or not keys.isdisjoint(read.keys)
        }
        for key in keys:
            self._last_change_of[key] = call.number
        if everything:
            self._last_clear = call.number
        self._last_change = call.number
        self._changes.append(call)
