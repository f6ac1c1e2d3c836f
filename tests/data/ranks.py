"""Ranks on the table for the executor's tests."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore
from kvtiers.model.keys import BlockKey
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of
from kvtiers.testing.faults import FaultyStore, HeldStore

OK = Outcome.OK
ROOMY = 2**28


def memory(*names: str, capacity: int = ROOMY) -> Callable[[Slab], dict[str, BlockStore]]:
    """Return a maker of memory stores."""
    return lambda slab: {name: MemoryStore(slab, capacity) for name in names}


def rank_with_faulty_store(**options: object) -> tuple[FakeRank, FaultyStore]:
    rank = FakeRank(
        make_stores=lambda slab: {"m": FaultyStore(MemoryStore(slab, ROOMY), slab)}, **options
    )
    store = rank.stores["m"]
    assert isinstance(store, FaultyStore)
    return rank, store


def rank_with_held_store(**options: object) -> tuple[FakeRank, HeldStore]:
    rank = FakeRank(make_stores=lambda slab: {"m": HeldStore(MemoryStore(slab, ROOMY))}, **options)
    store = rank.stores["m"]
    assert isinstance(store, HeldStore)
    return rank, store


LAYOUTS = {
    "one layer": make_layout(8, [[128]]),
    "layers of two sizes": make_layout(8, [[96, 640, 96]]),
    "three KV groups": make_layout(8, [[96, 96], [4098], [10, 20, 30]]),
    "large pages": make_layout(8, [[100_002, 50]]),
}


def assert_at_rest(rank: FakeRank) -> None:
    """Nothing runs, nothing lands, and no ticket is left."""
    assert rank.executor.idle
    assert not rank.shop.slots._landing
    assert rank.device.num_tickets == 0
    assert rank.executor.poll() == []


def offloaded(rank: FakeRank, *numbers: int, targets: int = 0) -> list[BlockKey]:
    """Offload blocks to the slots of their numbers, then wipe the engine's blocks."""
    keys = keys_of(*numbers)
    rank.fill(numbers, keys)
    job = rank.submit(rank.orders.offload(keys, numbers, numbers, targets))
    rank.settle()
    release(rank)
    assert all(outcomes == [OK] * len(keys) for outcomes in rank.outcomes(job).values())
    rank.fill(numbers, keys_of(*(100 + n for n in numbers)))
    return keys


def release(rank: FakeRank) -> None:
    """Let held stores work until nothing is held."""
    for store in rank.stores.values():
        while isinstance(store, HeldStore) and store.release():
            rank.settle()
