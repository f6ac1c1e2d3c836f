"""The store that is as slow as one wants."""

from __future__ import annotations

import pytest

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FakeClock
from kvtiers.testing.faults import ThrottledStore

NBYTES = 4096


def frame(idx: int, slot: int) -> FrameRef:
    return FrameRef(StoreKey(bytes([idx]) * 32), slot, NBYTES)


@pytest.fixture
def slab():
    slab = Slab(4, NBYTES, pin="off")
    yield slab
    slab.close()


def test_batches_come_one_after_another_at_the_bandwidth(slab):
    clock = FakeClock()
    store = ThrottledStore(MemoryStore(slab, 1 << 20), 2 * NBYTES, 0.5, clock)
    slab.view(0)[:] = bytes(range(256)) * 16
    store.put([frame(1, 0), frame(2, 0)])
    assert [answer.outcomes for answer in store.poll()] == [(Outcome.OK, Outcome.OK)], "at once"
    first, second = store.get([frame(1, 1), frame(2, 2)]), store.get([frame(1, 3)])
    assert store.poll() == []
    clock.advance(1.4)
    assert store.poll() == []
    clock.advance(0.2)
    (answer,) = store.poll()
    assert (answer.ticket, answer.seconds) == (first, 1.5)
    clock.advance(0.8)
    assert store.poll() == []
    clock.advance(0.2)
    (answer,) = store.poll()
    assert (answer.ticket, answer.seconds) == (second, 1.0)
    assert bytes(slab.view(3)) == bytes(slab.view(0))


def test_bandwidth_changes_for_what_comes_later(slab):
    clock = FakeClock()
    store = ThrottledStore(MemoryStore(slab, 1 << 20), NBYTES, clock=clock)
    store.put([frame(1, 0)])
    store.get([frame(1, 1)])
    store.bytes_per_second = 100 * NBYTES
    store.get([frame(1, 2)])
    clock.advance(0.99)
    assert len(store.poll()) == 1, "only the answer to the put"
    clock.advance(0.021)
    assert len(store.poll()) == 2
