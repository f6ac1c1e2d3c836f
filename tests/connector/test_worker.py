"""The worker's side of the engine-neutral interface, with a real executor thread."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from workers import OK, SOON, A, B, copy_all, copy_three, held, stores

from kvtiers.connector import worker as worker_module
from kvtiers.data.copier import Direction
from kvtiers.data.memory_store import MemoryStore
from kvtiers.model.messages import (
    DRAM,
    HBM,
    Forget,
    Link,
    WorkerReport,
    int64s,
)
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import keys_of

# The order of a step


def test_offload_after_the_forward_pass_has_what_it_computed(worker):
    order = worker.rank.orders.offload([A], [0], [0])
    worker.step(lambda: worker.rank.fill([0], [A]), after=(order,))
    worker.settle()
    worker.step(before=(worker.rank.orders.reload([A], [5], [0]),))
    worker.settle()
    assert worker.rank.holds(5, A)
    assert worker.outcomes(order) == {DRAM: [OK]}


@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_reads_what_the_engine_has_only_queued(make_worker, when):
    """R02: tokens are counted as computed once the forward pass returns; the device is behind."""
    worker = make_worker(make_copier=None)
    rank = worker.rank
    rank.fill([0], [B])
    order = rank.orders.offload([A], [0], [0])
    if when == "before":
        rank.device.compute(0, A)
        worker.step(before=(order,))
    else:
        worker.step(lambda: rank.device.compute(0, A), after=(order,))
    while not rank.device.num_copies(Direction.GATHER):
        time.sleep(0.0005)
    assert not rank.device.step(), "copied before its block was filled"
    rank.device.work()
    copy_all(worker)
    back = rank.orders.reload([A], [5], [0])
    worker.connector.begin_step(worker.orders(before=(back,)))
    copy_all(worker)
    assert rank.holds(5, A)


def test_fenced_block_is_read_before_begin_step_returns(make_worker):
    """Fifty times over, since the thread might just have been fast enough."""
    worker = make_worker()
    rank = worker.rank
    for number in range(50):
        rank.fill([0], keys_of(number))
        order = rank.orders.offload(keys_of(number), [0], [number % 8])
        worker.step(after=(order,))
        worker.step(
            lambda: rank.fill([0], keys_of(99)),  # overwrites what was just offloaded
            fences={order.job_id: int64s([0])},
        )
        reload = rank.orders.reload(keys_of(number), [5], [number % 8])
        worker.step(before=(reload,), sync_loads=(reload.job_id,))
        assert rank.holds(5, keys_of(number)[0])


def test_offload_of_a_preempted_block_may_be_fenced_in_its_own_step(worker):
    worker.rank.fill([0], [A])
    order = worker.rank.orders.offload([A], [0], [0])
    worker.step(
        lambda: worker.rank.fill([0], [B]), before=(order,), fences={order.job_id: int64s([0])}
    )
    worker.step(before=(worker.rank.orders.reload([A], [5], [0]),))
    worker.settle()
    assert worker.rank.holds(5, A)


def test_step_is_held_up_by_what_it_overwrites_not_by_the_rest_of_the_offload(make_worker):
    """The copies of the other blocks stand still all the time."""
    worker = make_worker(make_copier=None, piece_nbytes=192)
    rank, keys = worker.rank, keys_of(*range(8))
    rank.fill(range(8), keys)
    order = rank.orders.offload(keys, range(8), range(8))
    worker.step(after=(order,))
    while not rank.device.step():
        time.sleep(0.0005)
    worker.step(lambda: rank.fill([0], [A]), fences={order.job_id: int64s([0])})
    wanted = threading.Thread(target=copy_three, args=(rank.device,))
    wanted.start()
    worker.step(lambda: rank.fill([7], [B]), fences={order.job_id: int64s([7])})
    wanted.join()
    assert worker.outcomes(order) == {}, "not all of it has been read"
    copy_all(worker)
    worker.settle()
    assert worker.outcomes(order) == {DRAM: [OK] * 8}
    back = rank.orders.reload(keys, range(8), range(8))
    worker.connector.begin_step(worker.orders(before=(back,)))
    copy_all(worker)
    assert all(map(rank.holds, range(8), keys))


def test_reload_waits_for_the_reader_of_its_target(make_worker):
    """The offload of a block comes before the reload that lands on it, in one step."""
    worker = make_worker()
    [key] = worker.offloaded(3)
    worker.rank.fill([0], [A])
    offload = worker.rank.orders.offload([A], [0], [0])
    reload = worker.rank.orders.reload([key], [0], [3])
    worker.step(
        before=(reload, offload), fences={offload.job_id: int64s([0])}, sync_loads=(reload.job_id,)
    )
    assert worker.rank.holds(0, key)
    back = worker.rank.orders.reload([A], [6], [0])
    worker.step(before=(back,), sync_loads=(back.job_id,))
    assert worker.rank.holds(6, A)


def test_offload_that_is_not_read_in_time_is_dropped_and_counted(make_worker, monkeypatch, caplog):
    """Here a store keeps the thread from its work until the fence has given up."""
    monkeypatch.setattr(worker_module, "FENCE_SECONDS", 0.01)
    gate = threading.Event()

    class Slow(MemoryStore):
        def poll(self):
            gate.wait(SOON)
            return super().poll()

    worker = make_worker(make_stores=lambda slab: {"m": Slow(slab, 2**24)})
    executor, give_up = worker.rank.executor, worker.rank.executor.give_up
    monkeypatch.setattr(executor, "give_up", lambda ids: (give_up(ids), gate.set()))
    order = worker.rank.orders.offload([A], [0], [0])
    worker.step(before=(order,), fences={order.job_id: int64s([0])})
    worker.settle()
    assert worker.report.counters == {"fences_missed": 1}
    assert worker.outcomes(order) == {DRAM: [Outcome.TIMED_OUT]}
    assert "not read in time" in caplog.text


def test_step_is_begun_once(worker):
    """vLLM calls twice with the same orders where requests are preempted."""
    worker.rank.fill([0], [A])
    order = worker.rank.orders.offload([A], [0], [0])
    orders = worker.orders(before=(order,))
    worker.connector.begin_step(orders)
    worker.connector.begin_step(orders)
    worker.connector.end_step()
    worker.connector.end_step()
    worker.settle()
    assert worker.outcomes(order) == {DRAM: [OK]}
    assert len(worker.report.completions) == 1


def test_orders_of_an_earlier_step_change_nothing(worker):
    first, second = worker.orders(), worker.orders(epoch=1)
    worker.connector.begin_step(second)
    worker.connector.begin_step(replace(first, before=(worker.rank.orders.offload([A], [0], [0]),)))
    worker.connector.end_step()
    assert worker.settle().request_ids == set()
    assert worker.report.completions == ()


def test_new_epoch_voids_what_earlier_ones_left(make_worker):
    worker = make_worker(make_stores=stores)
    keys = worker.offloaded(0)
    order = worker.rank.orders.reload(keys, [5], [0])
    worker.step(epoch=1)
    worker.step(epoch=1, before=(order,))
    worker.settle()
    assert worker.outcomes(order) == {HBM: [Outcome.STALE]}


def test_forgotten_keys_leave_their_store(make_worker):
    worker = make_worker(make_stores=stores)
    worker.rank.fill([0], [A])
    worker.step(after=(worker.rank.orders.offload([A], [0], [0], 0b11),))
    worker.settle()
    worker.step(forgets=(Forget.of("m", [A]),))
    worker.settle()
    assert worker.rank.stores["m"].keys() == []
    assert worker.rank.stores["n"].keys() == [worker.rank.name(A)]


# Steps without tokens


@pytest.mark.alone
def test_empty_step_waits_for_a_load_but_not_for_long(make_worker):
    worker = make_worker(make_stores=held)
    order = worker.rank.orders.reload([A], [5], sources=1, window=[4])
    worker.step(before=(order,))
    started = time.perf_counter()
    worker.step(num_scheduled_tokens=0)
    waited = time.perf_counter() - started
    assert worker_module.IDLE_WAIT_SECONDS <= waited < 100 * worker_module.IDLE_WAIT_SECONDS


def test_empty_step_ends_as_soon_as_the_load_is_over(worker, monkeypatch):
    monkeypatch.setattr(worker_module, "IDLE_WAIT_SECONDS", SOON)
    keys = worker.offloaded(0)
    order = worker.rank.orders.reload(keys, [5], [0])
    started = time.perf_counter()
    loaded = worker.step(before=(order,), num_scheduled_tokens=0)
    assert loaded.request_ids == {order.request_id}
    assert time.perf_counter() - started < SOON / 2


def test_step_with_tokens_waits_for_nothing(make_worker, monkeypatch):
    monkeypatch.setattr(worker_module, "IDLE_WAIT_SECONDS", SOON)
    worker = make_worker(make_stores=held)
    started = time.perf_counter()
    worker.step(before=(worker.rank.orders.reload([A], [5], sources=1, window=[4]),))
    assert time.perf_counter() - started < SOON / 2


# Reports


def test_no_news_is_no_report(worker):
    worker.step()
    assert worker.connector.take_report() is None


def test_report_is_taken_once_and_leaves_loads_to_be_taken(worker):
    keys = worker.offloaded(0)
    order = worker.rank.orders.reload(keys, [5], [0])
    worker.connector.begin_step(worker.orders(before=(order,)))
    assert worker.thread.wait_idle(SOON)
    report = worker.connector.take_report()
    assert [c.job_id for c in report.completions] == [order.job_id]
    assert [link.name for link in report.links] == ["dram>hbm"]
    assert worker.connector.take_report() is None
    assert worker.connector.take_loaded().request_ids == {order.request_id}


def test_reports_of_ranks_merge():
    first = WorkerReport((), (Link("a", 1, 2, 3.0),), {"x": 1, "y": 2})
    second = WorkerReport((), (Link("b", 1, 2, 3.0),), {"y": 3, "z": 4})
    merged = first.merged(second)
    assert [link.name for link in merged.links] == ["a", "b"]
    assert merged.counters == {"x": 1, "y": 5, "z": 4}


def test_close_twice(worker):
    worker.connector.close()
    worker.connector.close()
    assert not worker.thread.alive


def test_columns_of_orders_are_not_changed(worker):
    """Orders are shared by all ranks of a process."""
    order = worker.rank.orders.reload([A, B], [5, 6], sources=0)
    slots = order.slots.copy()
    worker.step(before=(order,))
    worker.settle()
    assert (order.slots == slots).all()
    assert (order.block_ids == int64s([5, 6])).all()
