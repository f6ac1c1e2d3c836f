"""The LMDB store passes the suite, where it refuses when full and where it evicts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers import native
from kvtiers.data.lmdb_settings import Eviction, LMDBStoreSettings, WriteMap
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore, FrameRef
from kvtiers.model.errors import CapacityError
from kvtiers.model.frame import round_up
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import FaultyStore, LateStore
from kvtiers.testing.store_machine import StoreMachine, store_key_of
from kvtiers.testing.store_suite import (
    FRAME_NBYTES,
    NUM_SLOTS,
    SLOT_NBYTES,
    Harness,
    MakeStore,
    StoreSuite,
)


class LMDBSuite(StoreSuite):
    num_examples = 15
    shared = True
    says_held = True
    eviction = Eviction.NONE
    write_map = WriteMap.AUTO

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        path = folder / "shared.lmdb"
        return LMDBStore(
            slab,
            LMDBStoreSettings(
                path, capacity_nbytes, eviction=self.eviction, write_map=self.write_map
            ),
        )

    def num_fitting(self, capacity_nbytes: int) -> int:
        return capacity_nbytes // round_up(FRAME_NBYTES)


class TestLMDBStore(LMDBSuite):
    @pytest.mark.parametrize("capacity", [0, -1])
    def test_capacity_must_be_positive(self, slab: Slab, capacity: int, tmp_path: Path) -> None:
        with pytest.raises(CapacityError, match=str(capacity)):
            LMDBStoreSettings(tmp_path / "x", capacity)


class TestLMDBStoreWithoutWriteMap(LMDBSuite):
    write_map = WriteMap.OFF


class TestLMDBStoreWithoutCompiledModule(LMDBSuite):
    num_examples = 3

    @pytest.fixture(autouse=True)
    def portable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "available", lambda: False)


class TestLMDBStoreWithoutFaults(LMDBSuite):
    num_examples = 5

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return FaultyStore(super().make(slab, capacity_nbytes, folder), slab)


class TestLMDBStoreWithLateAnswers(LMDBSuite):
    num_examples = 5

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return LateStore(super().make(slab, capacity_nbytes, folder), polls=3)


class TestLMDBStoreWithAnswersOutOfOrder(LMDBSuite):
    num_examples = 5

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return LateStore(super().make(slab, capacity_nbytes, folder), polls=2, seed=5)


class EvictingMachine(StoreMachine):
    """A dictionary from which frames may vanish, but for none that the last put brought."""

    def holds_what_a_dictionary_would(self) -> None:
        if not self.log:
            held = set(self.store.keys()) - self.retired
            assert held <= {store_key_of(number) for number in self.model}
            self.model = {n: body for n, body in self.model.items() if store_key_of(n) in held}
            assert sum(map(len, self.model.values())) <= self.capacity_nbytes

    def _check_held(self, verb: str, number: int, outcome: Outcome, *, held: bool) -> None:
        super()._check_held(verb, number, outcome, held=held)
        self.is_held = held

    def _was_put(self, number: int, body: bytes, frame: FrameRef, outcome: Outcome) -> None:
        """What is held stays as it is; what was put before may have vanished by now."""
        assert outcome is Outcome.OK
        if not self.is_held:
            self.possible.setdefault(number, []).append(body)
            self.model[number] = body

    def _was_get(self, number: int, body: bytes, frame: FrameRef, outcome: Outcome) -> None:
        if outcome is Outcome.OK:
            view = bytes(self.slab.view(frame.slot))[: frame.nbytes]
            assert view in self.possible.get(number, [])
        else:
            assert outcome in (Outcome.MISSING, Outcome.CORRUPT)
            assert set(self.slab.view(frame.slot)) == {0xEE}

    def __init__(self, store: BlockStore, slab: Slab, capacity_nbytes: int) -> None:
        super().__init__(store, slab, capacity_nbytes)
        self.possible: dict[int, list[bytes]] = {}
        self.is_held = False


class TestLMDBStoreThatEvicts(LMDBSuite):
    """The promises about a full store are others: it takes everything, and stays in its bound."""

    eviction = Eviction.OLDEST

    def test_full_store_refuses_and_keeps_what_it_has(self, small: Harness) -> None:
        assert [small.put(n)[0] for n in range(16)] == [Outcome.OK] * 16
        assert small.held() == {store_key_of(n) for n in range(8, 16)}
        for n in range(16):
            assert small.get(n) == [Outcome.OK if n >= 8 else Outcome.MISSING]
            assert small.slot_is(0, n) == (n >= 8)

    def test_bound_counts_frames_that_are_being_written(self, small: Harness) -> None:
        frames = [small.filled(n, n) for n in range(16)]
        tickets = [small.store.put(frames[:8]), small.store.put(frames[8:])]
        assert small.settle(*tickets) == [Outcome.OK] * 16
        assert len(small.held()) == 8

    def test_batch_larger_than_the_store_fills_it(self, small: Harness) -> None:
        assert small.put(*range(16)) == [Outcome.OK] * 16
        assert len(small.held()) == 8

    def test_deleting_makes_room(self, small: Harness) -> None:
        for n in range(8):
            small.put(n)
        small.store.delete([store_key_of(5)])
        small.put(100)
        assert small.held() == {store_key_of(n) for n in (0, 1, 2, 3, 4, 6, 7, 100)}

    def test_frame_larger_than_the_store_is_refused(
        self, make_store: MakeStore, slab: Slab
    ) -> None:
        box = Harness(make_store(8192), slab)
        assert box.put(1) == [Outcome.FULL]
        assert box.held() == set()

    def test_what_was_read_lately_stays(self, small: Harness) -> None:
        for n in range(8):
            small.put(n)
        assert small.get(0) == [Outcome.OK]
        small.put(100)  # the access is noted with it or after it
        small.put(101)
        small.put(102)
        assert store_key_of(0) in small.held()
        assert store_key_of(2) not in small.held()

    def test_store_behaves_like_a_dictionary(self, make_store: MakeStore, slab: Slab) -> None:
        def machine() -> StoreMachine:
            return EvictingMachine(make_store(3 * SLOT_NBYTES), slab, 3 * SLOT_NBYTES)

        config = settings(
            max_examples=self.num_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
        run_state_machine_as_test(machine, settings=config)

    def test_steady_rewriting_at_capacity_loses_no_frame_but_the_oldest(
        self, small: Harness
    ) -> None:
        for n in range(0, 400, 4):
            assert small.put(n, n + 1, n + 2, n + 3) == [Outcome.OK] * 4
        assert small.held() == {store_key_of(n) for n in range(392, 400)}
        assert len(small.held()) < NUM_SLOTS
