"""The suite finds stores that break a promise: a suite that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import WrapperStore
from kvtiers.testing.store_machine import StoreMachine
from kvtiers.testing.store_suite import Harness, StoreSuite

CAPACITY = 30_000

# No shrinking: that there is a failure is all that is asked.
CONFIG = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


class KeepsDeleted(WrapperStore):
    def delete(self, keys: Iterable[StoreKey]) -> None:
        pass


class KeepsRetired(WrapperStore):
    def retire(self) -> None:
        pass


class Overwrites(WrapperStore):
    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        self.inner.delete([frame.key for frame in frames])
        return self.inner.put(frames)


class ListsRefused(WrapperStore):
    """A failed put stays visible: R53."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.offered: set[StoreKey] = set()

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        self.offered |= {frame.key for frame in frames}
        return self.inner.put(frames)

    def keys(self) -> list[StoreKey]:
        return list(self.offered | set(self.inner.keys()))


class Relabels(WrapperStore):
    """Answers every batch with other outcomes."""

    old, new = Outcome.MISSING, Outcome.OK

    def poll(self) -> list[StoreAnswer]:
        return [
            replace(a, outcomes=tuple(self.new if o is self.old else o for o in a.outcomes))
            for a in self.inner.poll()
        ]


class CallsMissingOk(Relabels):
    """R33: a failed load counted as loaded."""


class CallsCorruptOk(Relabels):
    old = Outcome.CORRUPT


class CallsFullOk(Relabels):
    old = Outcome.FULL


class SwapsOutcomes(WrapperStore):
    def poll(self) -> list[StoreAnswer]:
        return [replace(a, outcomes=a.outcomes[::-1]) for a in self.inner.poll()]


class AnswersTwice(WrapperStore):
    def poll(self) -> list[StoreAnswer]:
        return self.inner.poll() * 2


class CallsAllHeld(WrapperStore):
    def poll(self) -> list[StoreAnswer]:
        return [replace(a, held=frozenset(range(len(a.outcomes)))) for a in self.inner.poll()]


class SaysNothingOfHeld(WrapperStore):
    """A store that was written before answers had the word."""

    def poll(self) -> list[StoreAnswer]:
        return [StoreAnswer(a.ticket, a.outcomes, a.seconds) for a in self.inner.poll()]


class SwapsFrames(WrapperStore):
    """R37: brings another frame's bytes."""

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        slots = [frame.slot for frame in reversed(frames)]
        return self.inner.get([replace(f, slot=s) for f, s in zip(frames, slots, strict=True)])


@pytest.mark.parametrize(
    "broken",
    [
        KeepsDeleted,
        Overwrites,
        ListsRefused,
        CallsMissingOk,
        CallsCorruptOk,
        CallsFullOk,
        SwapsOutcomes,
        AnswersTwice,
        CallsAllHeld,
        SwapsFrames,
    ],
)
def test_machine_finds_a_store_that(broken: Callable[[MemoryStore], WrapperStore]) -> None:
    slab = Slab(16, 12_288, pin="off")

    def machine() -> StoreMachine:
        return StoreMachine(broken(MemoryStore(slab, CAPACITY)), slab, CAPACITY)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=CONFIG)


@pytest.mark.parametrize("says_held", [False, True])
def test_store_that_does_not_say_what_it_held_passes_where_it_need_not(says_held: bool) -> None:
    slab = Slab(16, 12_288, pin="off")

    def machine() -> StoreMachine:
        store = SaysNothingOfHeld(MemoryStore(slab, CAPACITY))
        return StoreMachine(store, slab, CAPACITY, says_held=says_held)

    found = pytest.raises(AssertionError, match="said to be written")
    with found if says_held else nullcontext():
        run_state_machine_as_test(machine, settings=CONFIG)


def test_machine_finds_a_store_that_ignores_its_bound() -> None:
    slab = Slab(16, 12_288, pin="off")

    def machine() -> StoreMachine:
        return StoreMachine(MemoryStore(slab, 2**30), slab, CAPACITY)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=CONFIG)


def test_suite_finds_a_store_that_keeps_what_was_retired() -> None:
    class Suite(StoreSuite):
        def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> WrapperStore:
            return KeepsRetired(MemoryStore(slab, capacity_nbytes))

    slab = Slab(16, 12_288, pin="off")
    suite = Suite()
    harness = Harness(suite.make(slab, 8 * 12_288, Path()), slab)
    with pytest.raises(AssertionError):
        suite.test_retiring_makes_room(harness)
