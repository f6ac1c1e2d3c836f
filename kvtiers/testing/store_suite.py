"""The promises of a `BlockStore`, as tests that every store must pass.

A store's test module subclasses `StoreSuite`, names it ``Test...`` and overrides `make`::

    class TestMyStore(StoreSuite):
        def make(self, slab, capacity_nbytes, folder):
            return MyStore(slab, capacity_nbytes, folder)
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore, FrameRef, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import StoreMachine, frame_bytes, store_key_of, wait_answers

SLOT_NBYTES = 12_288
FRAME_NBYTES = 10_000  # a store must neither need nor move the rest of a slot
NUM_SLOTS = 16

MakeStore = Callable[..., BlockStore]


class Harness:
    """A store over a slab, with the moves that tests are made of."""

    def __init__(self, store: BlockStore, slab: Slab) -> None:
        self.store = store
        self.slab = slab

    def frame(self, number: int, slot: int, nbytes: int = FRAME_NBYTES) -> FrameRef:
        """Name a frame without touching its slot."""
        return FrameRef(store_key_of(number), slot, nbytes)

    def filled(self, number: int, slot: int, version: int = 0) -> FrameRef:
        """Name a frame whose bytes are in its slot."""
        self.slab.view(slot)[:FRAME_NBYTES] = frame_bytes(number, FRAME_NBYTES, version)
        return self.frame(number, slot)

    def wipe(self, slot: int) -> None:
        """Fill a slot with bytes that belong to no frame."""
        self.slab.view(slot)[:] = b"\xee" * self.slab.slot_nbytes

    def settle(self, *tickets: StoreTicket) -> list[Outcome]:
        """Wait for the answers of batches; returns their outcomes, one after another."""
        answers = wait_answers(self.store, tickets)
        return [outcome for ticket in tickets for outcome in answers[ticket].outcomes]

    def held_of(self, *tickets: StoreTicket) -> list[frozenset[int]]:
        """Wait for the answers of puts that are OK; returns which rows of each were held."""
        answers = wait_answers(self.store, tickets)
        assert {what for answer in answers.values() for what in answer.outcomes} == {Outcome.OK}
        return [answers[ticket].held for ticket in tickets]

    def put(self, *numbers: int) -> list[Outcome]:
        """Put frames in one batch, from slots 0, 1, ...; returns their outcomes."""
        frames = [self.filled(number, slot) for slot, number in enumerate(numbers)]
        return self.settle(self.store.put(frames))

    def get(self, *numbers: int) -> list[Outcome]:
        """Get frames in one batch into wiped slots 0, 1, ...; returns their outcomes."""
        for slot in range(len(numbers)):
            self.wipe(slot)
        frames = [self.frame(number, slot) for slot, number in enumerate(numbers)]
        return self.settle(self.store.get(frames))

    def slot_is(self, slot: int, number: int, version: int = 0) -> bool:
        """Whether a slot begins with a frame."""
        expected = frame_bytes(number, FRAME_NBYTES, version)
        return bytes(self.slab.view(slot)[:FRAME_NBYTES]) == expected

    def slot_is_wiped(self, slot: int) -> bool:
        """Whether nothing has touched a slot since `wipe`."""
        return set(self.slab.view(slot)) == {0xEE}

    def held(self) -> set[StoreKey]:
        """Return the keys held, having checked that none is listed twice."""
        keys = self.store.keys()
        assert len(keys) == len(set(keys))
        return set(keys)


class StoreSuite(ABC):
    """What every store must do. Subclass it and override `make`."""

    num_examples = 50  # of the state machine; fewer for a slow medium
    shared = False  # whether several engines use it, so that `retire` may drop nothing
    says_held = False  # whether it must say which frames of a put it held; a new store should

    @abstractmethod
    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        """Return an empty store.

        Args:
            slab: where slots are. capacity_nbytes: its bound. folder: an empty one of its own.
        """

    def num_fitting(self, capacity_nbytes: int) -> int:
        """Return how many frames of `FRAME_NBYTES` must fit; less for a store with overhead."""
        return capacity_nbytes // FRAME_NBYTES

    # -- fixtures ---------------------------------------------------------------------

    @pytest.fixture
    def slab(self) -> Iterator[Slab]:
        """A slab whose slots are larger than a frame."""
        slab = Slab(NUM_SLOTS, SLOT_NBYTES, pin="off")
        yield slab
        slab.close()

    @pytest.fixture
    def make_store(self, slab: Slab, tmp_path: Path) -> Iterator[MakeStore]:
        """A function that makes an empty store of a capacity, closed after the test."""
        counter = itertools.count()
        with contextlib.ExitStack() as stack:

            def build(capacity_nbytes: int = 2**24) -> BlockStore:
                folder = tmp_path / f"store{next(counter)}"
                folder.mkdir()
                store = self.make(slab, capacity_nbytes, folder)
                stack.callback(store.close)
                return store

            yield build

    @pytest.fixture
    def box(self, make_store: MakeStore, slab: Slab) -> Harness:
        """A roomy store."""
        return Harness(make_store(), slab)

    @pytest.fixture
    def small(self, make_store: MakeStore, slab: Slab) -> Harness:
        """A store with room for about 8 frames."""
        return Harness(make_store(8 * SLOT_NBYTES), slab)

    # -- bytes ------------------------------------------------------------------------

    def test_new_store_is_empty(self, box: Harness) -> None:
        """Nothing is held, and nothing is answered."""
        assert box.held() == set()
        assert box.store.poll() == []

    def test_frames_come_back_bit_exact(self, box: Harness) -> None:
        """In another order and into other slots than they came from."""
        assert box.put(1, 2, 3) == [Outcome.OK] * 3
        assert box.get(3, 1, 2) == [Outcome.OK] * 3
        assert [box.slot_is(slot, n) for slot, n in enumerate((3, 1, 2))] == [True] * 3

    def test_get_leaves_the_rest_of_the_slot_alone_or_at_least_in_the_slot(
        self, box: Harness
    ) -> None:
        """Padding may be written, the neighbour's slot may not."""
        box.put(1)
        for slot in (4, 6):
            box.wipe(slot)
        assert box.settle(box.store.get([box.frame(1, 5)])) == [Outcome.OK]
        assert box.slot_is(5, 1)
        assert box.slot_is_wiped(4)
        assert box.slot_is_wiped(6)

    def test_put_copies_the_slot(self, box: Harness) -> None:
        """Once answered, the slot may be reused."""
        box.put(1)
        box.wipe(0)
        assert box.get(1) == [Outcome.OK]
        assert box.slot_is(0, 1)

    def test_frames_of_several_sizes_live_together(self, box: Harness) -> None:
        """KV groups have frames of different sizes."""
        sizes = {1: 4097, 2: FRAME_NBYTES, 3: SLOT_NBYTES}
        for number, nbytes in sizes.items():
            box.slab.view(number)[:nbytes] = frame_bytes(number, nbytes)
        frames = [box.frame(number, number, nbytes) for number, nbytes in sizes.items()]
        assert box.settle(box.store.put(frames)) == [Outcome.OK] * 3
        for number in sizes:
            box.wipe(number)
        assert box.settle(box.store.get(frames)) == [Outcome.OK] * 3
        for number, nbytes in sizes.items():
            assert bytes(box.slab.view(number)[:nbytes]) == frame_bytes(number, nbytes)

    # -- what a key means -------------------------------------------------------------

    def test_keys_are_those_of_answered_puts(self, box: Harness) -> None:
        """And only those."""
        box.put(1, 2)
        box.put(3)
        assert box.held() == {store_key_of(n) for n in (1, 2, 3)}

    def test_second_put_of_a_key_is_ok_and_changes_nothing(self, box: Harness) -> None:
        """A key is content: what is there is right."""
        box.put(1)
        again = box.settle(box.store.put([box.filled(1, 0, version=1)]))
        assert again == [Outcome.OK]
        assert box.get(1) == [Outcome.OK]
        assert box.slot_is(0, 1, version=0)
        assert box.held() == {store_key_of(1)}

    def test_key_twice_in_one_batch_is_held_once(self, box: Harness) -> None:
        """Both are OK."""
        frames = [box.filled(1, 0), box.filled(1, 1)]
        assert box.settle(box.store.put(frames)) == [Outcome.OK] * 2
        assert box.held() == {store_key_of(1)}
        assert box.get(1) == [Outcome.OK]
        assert box.slot_is(0, 1)

    def test_what_is_said_to_be_held_was(self, box: Harness) -> None:
        """Of frames that nobody put before, none; nor of those that were deleted since."""
        frames = [box.filled(n, n) for n in range(3)]
        assert box.held_of(box.store.put(frames)) == [frozenset()]
        box.store.delete([store_key_of(1)])
        assert box.held_of(box.store.put(frames[1:2])) == [frozenset()]

    def test_frames_that_were_held_are_said_to_be(self, box: Harness) -> None:
        """Among others, twice in a batch, and while another batch still writes them."""
        if not self.says_held:
            pytest.skip("it does not say which frames of a put it held")
        box.put(1, 2)
        frames = [box.filled(n, slot) for slot, n in enumerate((1, 3, 2, 4))]
        assert box.held_of(box.store.put(frames)) == [{0, 2}]
        assert box.held_of(box.store.put([box.filled(5, 0), box.filled(5, 1)])) == [{1}]
        tickets = [box.store.put([box.filled(6, slot)]) for slot in range(3)]
        assert box.held_of(*tickets) == [frozenset(), {0}, {0}]

    def test_missing_key_is_missing_and_leaves_its_slot(self, box: Harness) -> None:
        """Alone and among others."""
        box.put(1, 2)
        assert box.get(1, 99, 2) == [Outcome.OK, Outcome.MISSING, Outcome.OK]
        assert box.slot_is_wiped(1)
        assert box.slot_is(2, 2)

    @pytest.mark.parametrize("nbytes", [FRAME_NBYTES - 1, FRAME_NBYTES + 1, 4097])
    def test_frame_of_another_size_is_corrupt(self, box: Harness, nbytes: int) -> None:
        """Never a part of a frame, never a frame and then something else."""
        box.put(1)
        box.wipe(3)
        assert box.settle(box.store.get([box.frame(1, 3, nbytes)])) == [Outcome.CORRUPT]
        assert box.slot_is_wiped(3)

    # -- deletion ---------------------------------------------------------------------

    def test_deleted_frame_is_missing_and_can_be_put_again(self, box: Harness) -> None:
        """With other bytes, too."""
        box.put(1, 2)
        box.store.delete([store_key_of(1)])
        assert box.held() == {store_key_of(2)}
        assert box.get(1, 2) == [Outcome.MISSING, Outcome.OK]
        assert box.settle(box.store.put([box.filled(1, 0, version=1)])) == [Outcome.OK]
        assert box.get(1) == [Outcome.OK]
        assert box.slot_is(0, 1, version=1)

    def test_deleting_what_is_not_there_is_no_error(self, box: Harness) -> None:
        """Nor is deleting twice, or nothing."""
        box.put(1)
        box.store.delete([store_key_of(7), store_key_of(1), store_key_of(1)])
        box.store.delete([])
        box.store.delete([store_key_of(1)])
        assert box.held() == set()

    def test_calls_on_one_key_take_effect_in_their_order(self, box: Harness) -> None:
        """Put, delete, put, get without waiting in between."""
        first = box.store.put([box.filled(1, 0, version=0)])
        box.store.delete([store_key_of(1)])
        second = box.store.put([box.filled(1, 1, version=1)])
        box.wipe(2)
        third = box.store.get([box.frame(1, 2)])
        assert box.settle(first, second, third)[1:] == [Outcome.OK] * 2
        assert box.slot_is(2, 1, version=1)

    def test_retired_frames_are_right_or_missing(self, box: Harness) -> None:
        """And the store goes on."""
        box.put(1, 2)
        box.store.retire()
        assert box.put(3) == [Outcome.OK]
        for slot, outcome in enumerate(box.get(1, 2, 3)):
            assert outcome is Outcome.OK or (outcome is Outcome.MISSING and slot < 2)
            assert box.slot_is(slot, slot + 1) == (outcome is Outcome.OK)

    # -- the bound --------------------------------------------------------------------

    def test_full_store_refuses_and_keeps_what_it_has(self, small: Harness) -> None:
        """A refused key is absent, and the bytes held stay within the bound."""
        outcomes = [small.put(n)[0] for n in range(16)]
        kept = {n for n, outcome in enumerate(outcomes) if outcome is Outcome.OK}
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        assert self.num_fitting(8 * SLOT_NBYTES) <= len(kept) <= 8 * SLOT_NBYTES // FRAME_NBYTES
        assert small.held() == {store_key_of(n) for n in kept}
        for n in range(16):
            assert small.get(n) == [Outcome.OK if n in kept else Outcome.MISSING]
            assert small.slot_is(0, n) == (n in kept)

    def test_bound_counts_frames_that_are_being_written(self, small: Harness) -> None:
        """Two batches submitted at once do not both take the last room."""
        frames = [small.filled(n, n) for n in range(16)]
        tickets = [small.store.put(frames[:8]), small.store.put(frames[8:])]
        outcomes = small.settle(*tickets)
        assert outcomes.count(Outcome.OK) * FRAME_NBYTES <= 8 * SLOT_NBYTES
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        assert len(small.held()) == outcomes.count(Outcome.OK)

    def test_batch_larger_than_the_store_fills_it(self, small: Harness) -> None:
        """The frames that fit are kept, not lost with the rest."""
        outcomes = small.put(*range(16))
        assert outcomes.count(Outcome.OK) >= self.num_fitting(8 * SLOT_NBYTES)
        kept = {store_key_of(n) for n, o in enumerate(outcomes) if o is Outcome.OK}
        assert small.held() == kept

    def test_deleting_makes_room(self, small: Harness) -> None:
        """For as many frames, a hundred times over."""
        kept = [n for n in range(16) if small.put(n) == [Outcome.OK]]
        for turn in range(100):
            victim = kept.pop(0)
            small.store.delete([store_key_of(victim)])
            assert small.put(100 + turn) == [Outcome.OK]
            kept.append(100 + turn)
        assert small.held() == {store_key_of(n) for n in kept}

    def test_retiring_makes_room(self, small: Harness) -> None:
        """The whole bound is free again, also of frames that were being written."""
        if self.shared:
            pytest.skip("a shared store keeps what other engines may ask for")
        before = small.put(*range(16)).count(Outcome.OK)
        small.store.retire()
        ticket = small.store.put([small.filled(n, n - 100) for n in range(100, 116)])
        small.store.retire()
        assert small.settle(ticket).count(Outcome.OK) == before
        assert small.put(*range(200, 216)).count(Outcome.OK) == before
        kept = [n for n in range(200, 216) if small.get(n) == [Outcome.OK]]
        assert len(kept) == before

    # -- answers ----------------------------------------------------------------------

    def test_every_batch_is_answered_once(self, box: Harness) -> None:
        """With its own ticket and one outcome a frame, in order."""
        tickets = [box.store.put([box.filled(n, n)]) for n in range(8)]
        tickets.append(box.store.get([box.frame(99, 9), box.frame(98, 10)]))
        assert len(set(tickets)) == 9
        answers = wait_answers(box.store, tickets)
        assert [len(answers[ticket].outcomes) for ticket in tickets] == [1] * 8 + [2]
        assert answers[tickets[-1]].outcomes == (Outcome.MISSING,) * 2
        assert box.store.poll() == []

    def test_empty_batch_is_answered(self, box: Harness) -> None:
        """With no outcome."""
        assert box.settle(box.store.put([]), box.store.get([])) == []

    def test_poll_and_submit_do_not_wait(self, box: Harness) -> None:
        """A call is cheap however much is under way; the limit is for the slowest machine."""
        started = time.perf_counter()
        tickets = [box.store.put([box.filled(n, n)]) for n in range(NUM_SLOTS)]
        box.store.poll()
        assert time.perf_counter() - started < 1.0
        del tickets

    # -- the end ----------------------------------------------------------------------

    def test_close_twice(self, box: Harness) -> None:
        """Is no error."""
        box.put(1)
        box.store.close()
        box.store.close()

    def test_close_finishes_what_was_submitted(self, box: Harness) -> None:
        """No slot is touched after close has returned."""
        box.put(1)
        slots = range(NUM_SLOTS)
        box.store.get([box.frame(1, slot) for slot in slots])
        box.store.close()
        for slot in slots:
            box.wipe(slot)
        time.sleep(0.02)  # not to wait for something: to let a thread that runs on be seen
        assert all(box.slot_is_wiped(slot) for slot in slots)

    # -- all of it --------------------------------------------------------------------

    def test_store_behaves_like_a_dictionary(self, make_store: MakeStore, slab: Slab) -> None:
        """Any sequence of calls, several batches at a time, against a plain dict."""

        def machine() -> StoreMachine:
            store, nbytes = make_store(3 * SLOT_NBYTES), 3 * SLOT_NBYTES
            return StoreMachine(store, slab, nbytes, says_held=self.says_held)

        config = settings(
            max_examples=self.num_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
        run_state_machine_as_test(machine, settings=config)  # type: ignore[arg-type]
