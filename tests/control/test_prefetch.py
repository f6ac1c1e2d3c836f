"""Blocks come from stores to DRAM while their request waits, at nobody's cost."""

from __future__ import annotations

import numpy as np

from kvtiers.control.prefetch import Arrival
from kvtiers.cost.planner import PlanPolicy
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.keys import BlockKey
from kvtiers.model.messages import Presence, StepOrders, Transfer, TransferKind
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import BLOCKS_PREFETCHED, BLOCKS_RELOADED

from .scenes import BLOCK_SIZE, DISK, SHARED, Scene, chain, dram, reloads, resident

NUM_SLOTS = 32
B = chain("b", 4)
FULL = [chain(f"full{i}-", 8) for i in range(NUM_SLOTS // 8)]


def arrive(scene: Scene, keys: list[BlockKey], request: str = "waits", start: int = 0) -> None:
    num_tokens = len(keys) * BLOCK_SIZE + 1
    scene.controller.arrived([keys], scene.now)
    scene.controller.prefetch(Arrival(request, [keys], start, num_tokens))


def promotions(orders: StepOrders) -> list[Transfer]:
    return [order for order in orders.before if order.kind is TransferKind.PROMOTE]


def stored(*chains: list[BlockKey], **settings: object) -> Scene:
    """A scene in which only the disk has some chains, and DRAM is full of others, stored too."""
    scene = Scene(dram(NUM_SLOTS, DISK, **settings))
    for keys in (*chains, *FULL):
        assert scene.offload(keys) == len(keys)
    assert not any(resident(scene, keys) for keys in chains)
    return scene


def test_what_waits_is_brought_to_dram_and_reloaded_from_there():
    scene = stored(B)
    arrive(scene, B)
    (order,) = promotions(scene.step())
    assert order.block_keys() == B
    scene.settle()
    assert resident(scene, B) == [0, 1, 2, 3]
    assert scene.hits(B, request="waits") == len(B)
    scene.load(B, request="waits")
    (reload,) = reloads(scene.step())
    assert reload.sources.tolist() == [0] * len(B)
    scene.settle()
    assert scene.controller.counters.value(BLOCKS_PREFETCHED) == len(B)
    assert scene.controller.counters.value(BLOCKS_RELOADED, ("disk",)) == 0


def test_a_request_that_is_admitted_at_once_is_not_prefetched():
    scene = stored(B)
    arrive(scene, B)
    assert scene.hits(B, request="waits") == len(B)
    scene.load(B, request="waits")
    assert promotions(scene.step()) == []
    scene.settle()
    arrive(scene, FULL[0], request="computed")
    scene.controller.admitted("computed")
    assert promotions(scene.step()) == []


def test_what_the_engine_has_itself_is_not_read():
    """R31."""
    scene = stored(B)
    arrive(scene, B, start=3)
    (order,) = promotions(scene.step())
    assert order.block_keys() == B[3:]
    scene.settle()


def test_what_is_not_worth_a_reload_is_not_prefetched():
    scene = stored(B)
    scene.controller.cost.policy = PlanPolicy(CostMode.NEVER)
    arrive(scene, B)
    assert promotions(scene.step()) == []


def test_without_a_budget_nothing_is_prefetched():
    scene = stored(B, prefetch_share=0.0)
    arrive(scene, B)
    assert promotions(scene.step()) == []


def test_waiting_requests_share_a_quarter_of_the_slots_and_one_gets_half_of_it():
    docs = [chain(f"{i}-", 8) for i in range(4)]
    scene = stored(*docs)
    for i, keys in enumerate(docs):
        arrive(scene, keys, request=f"r{i}")
    orders = promotions(scene.step())
    assert [order.num_blocks for order in orders] == [4, 4]
    assert [order.block_keys() for order in orders] == [docs[0][:4], docs[1][:4]]
    scene.settle()
    assert promotions(scene.step()) == []  # what was brought counts until its request goes on
    scene.controller.admitted("r0")
    (order,) = promotions(scene.step())
    assert order.block_keys() == docs[2][:4]
    scene.settle()
    assert scene.controller.dram.num_pins == 0


def test_a_request_that_ends_early_leaves_ordinary_blocks_behind():
    scene = stored(B, chain("next", 4))
    arrive(scene, B)
    orders = scene.step()
    scene.controller.finished("waits")
    scene.answer(promotions(orders)[0].job_id)
    assert resident(scene, B) == [0, 1, 2, 3]
    assert all(scene.controller.dram.get(key).evictable for key in B)
    for i in range(4):
        scene.offload(chain(f"later{i}-", 8))
    assert resident(scene, B) == []


def test_blocks_that_only_dram_has_are_not_evicted_for_a_prefetch():
    scene = Scene(dram(8, DISK))
    scene.offload(B)
    scene.ranks[0].stores["disk"].broken = True
    only = [chain(f"only{i}-", 1) for i in range(8)]
    for keys in only:
        scene.offload(keys)
    scene.ranks[0].stores["disk"].broken = False
    assert scene.controller.dram.num_free == 0
    arrive(scene, B)
    assert promotions(scene.step()) == []
    assert all(resident(scene, keys) for keys in only)
    scene.controller.dram.evict(scene.controller.dram.get(only[0][0]))
    (order,) = promotions(scene.step())
    assert order.block_keys() == B[:1]
    scene.settle()


def test_a_reload_that_starts_meanwhile_waits_for_what_is_coming_and_reads_nothing_twice():
    scene = stored(B)
    arrive(scene, B)
    (promotion,) = promotions(scene.step())
    assert scene.hits(B, request="waits") == len(B)
    job_id = scene.load(B, request="waits")
    (reload,) = reloads(scene.step())
    assert reload.sources.tolist() == [0] * len(B)
    assert reload.slots.tolist() == promotion.slots.tolist()
    assert job_id not in scene.ranks[0].answerable()
    scene.answer(promotion.job_id)
    done = scene.answer(job_id)
    assert done is not None
    assert (done.num_loaded, done.num_failed) == (len(B), 0)


def test_a_promotion_that_fails_is_a_miss_and_the_store_keeps_the_blocks():
    scene = stored(B)
    arrive(scene, B)
    (order,) = promotions(scene.step())
    scene.load(B, request="waits")
    scene.step()
    scene.answer(order.job_id, dict.fromkeys(range(2, 4), Outcome.FAILED))
    (done,) = scene.settle()
    assert (done.num_loaded, done.num_failed) == (2, 2)
    assert resident(scene, B) == [0, 1]
    assert scene.hits(B, request="another") == len(B)


def test_a_promotion_that_hangs_is_not_waited_for_by_the_next_request():
    scene = stored(B)
    arrive(scene, B)
    (order,) = promotions(scene.step())
    scene.controller.completed(scene.ranks[0].answer(order.job_id, late=True), scene.now)
    assert resident(scene, B) == []
    assert scene.controller.dram.num_busy == len(B)  # until the store lets go
    scene.answer(order.job_id)
    assert scene.controller.dram.num_busy == 0


def test_a_store_that_is_switched_off_is_not_prefetched_from():
    docs = [chain(f"{i}-", 4) for i in range(3)]
    scene = stored(B, *docs)
    for i, keys in enumerate(docs):
        arrive(scene, keys, request=f"r{i}")
        (order,) = promotions(scene.step())
        scene.answer(order.job_id, dict.fromkeys(range(4), Outcome.FAILED))
        scene.controller.finished(f"r{i}")
    assert not scene.controller.gates.readable(0)
    arrive(scene, B)
    assert promotions(scene.step()) == []


def test_what_was_found_before_a_store_was_switched_off_is_not_prefetched_after():
    docs = [chain(f"{i}-", 4) for i in range(2)]
    scene = Scene(dram(8, DISK, max_window=2))
    for keys in (*docs, B, FULL[0]):
        scene.offload(keys)
    jobs = [scene.load(keys, request=f"r{i}") for i, keys in enumerate(docs)]
    arrive(scene, B)
    assert promotions(scene.step()) == []  # half of the slots are held by loads
    rank = scene.ranks[0]
    for job_id in jobs:
        scene.controller.completed(rank.answer(job_id, late=True), scene.now)
    assert not scene.controller.gates.readable(0)
    for job_id in jobs:
        scene.answer(job_id)
    assert scene.controller.dram.num_busy == 0
    assert promotions(scene.step()) == []


def test_a_shared_store_is_asked_on_arrival_and_prefetched_from_when_it_has_answered():
    scene = Scene(dram(NUM_SLOTS, SHARED))
    for key in B:
        scene.shared.put((0, scene.ranks[0].rank, key))
    arrive(scene, B)
    (lookup,) = scene.controller.take_lookups()
    assert promotions(scene.step()) == []
    present = np.ones(len(B), np.uint8)
    scene.controller.answered(Presence(lookup.store, lookup.keys, present))
    (order,) = promotions(scene.step())
    assert order.block_keys() == B
    scene.settle()
    assert resident(scene, B) == [0, 1, 2, 3]


def test_a_reset_ends_all_prefetches():
    scene = stored(B)
    arrive(scene, B)
    scene.controller.reset()
    assert promotions(scene.step()) == []
    arrive(scene, B, request="after")
    assert promotions(scene.step()) == []  # nothing of the past is found
    scene.settle()
