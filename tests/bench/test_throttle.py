"""A throttled store answers reads when their bytes could have come, and not before."""

from dataclasses import dataclass

import pytest

from kvtiers.bench.throttle import ThrottledStore
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

NBYTES = 1000


@dataclass
class Clock:
    now: float = 5.0

    def __call__(self):
        return self.now


@pytest.fixture
def slab():
    slab = Slab(4, 4096, pin="off")
    yield slab
    slab.close()


def frames(*numbers):
    return [FrameRef(StoreKey(bytes([n]) * 32), n, NBYTES) for n in numbers]


def test_reads_follow_one_another_at_the_given_speed(slab):
    clock = Clock()
    store = ThrottledStore(MemoryStore(slab, 10**6), 500.0, clock)
    store.put(frames(0, 1, 2))
    (written,) = store.poll()
    assert written.outcomes == (Outcome.OK,) * 3  # writes are not slowed down
    first, second = store.get(frames(0, 1)), store.get(frames(2))
    assert store.poll() == []
    clock.now += 3.9
    assert store.poll() == []
    clock.now += 0.1
    (answer,) = store.poll()
    assert (answer.ticket, answer.outcomes) == (first, (Outcome.OK,) * 2)
    assert answer.seconds == pytest.approx(4.0)
    clock.now += 2.0
    (answer,) = store.poll()
    assert (answer.ticket, answer.seconds) == (second, pytest.approx(2.0))
    clock.now += 100.0  # an idle link is not ahead of its time
    store.get(frames(0))
    assert store.poll() == []
    clock.now += 2.0
    assert len(store.poll()) == 1


def test_the_rest_passes(slab):
    store = ThrottledStore(MemoryStore(slab, 10**6), 1e12)
    store.put(frames(0, 1))
    assert len(store.keys()) == 2
    store.delete([frames(0)[0].key])
    assert store.keys() == [frames(1)[0].key]
    store.retire()
    assert store.keys() == []
    store.close()


def test_a_speed_of_nothing_is_refused(slab):
    with pytest.raises(ValueError, match="never answers"):
        ThrottledStore(MemoryStore(slab, 10**6), 0.0)
