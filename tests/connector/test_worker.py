"""The worker's side of the engine-neutral interface, with a real executor thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvtiers.connector import worker as worker_module
from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier import Direction
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import Rank
from kvtiers.model.messages import (
    DRAM,
    HBM,
    Forget,
    Hello,
    Link,
    StepOrders,
    Transfer,
    WorkerReport,
    int64s,
)
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import FakeDevice
from kvtiers.testing.fake_rank import FINGERPRINT, FakeRank, keys_of
from kvtiers.testing.faults import FaultyStore, HeldStore

OK = Outcome.OK
SOON = 30.0  # seconds; a limit that only a failure reaches
A, B, C, D = keys_of(1, 2, 3, 4)


class Worker:
    """A worker connector with steps that number themselves, and the answers to them."""

    def __init__(self, rank: FakeRank) -> None:
        self.rank = rank
        self.thread = ExecutorThread(rank.executor)
        hello = Hello(Rank(), FINGERPRINT, 8, rank.slab.slot_nbytes, (192,), pinned=False)
        self.connector = WorkerConnector(hello, self.thread, rank.copier.mark)
        self.num_steps = 0
        self.report = WorkerReport()

    def orders(self, **orders) -> StepOrders:
        self.num_steps += 1
        orders.setdefault("epoch", 0)
        orders.setdefault("num_scheduled_tokens", 1)
        return StepOrders(step=self.num_steps, **orders)

    def step(self, forward: Callable[[], object] = lambda: None, **orders):
        """Run one engine step; returns what was loaded."""
        self.connector.begin_step(self.orders(**orders))
        self.connector.load_in_step()
        forward()
        self.connector.end_step()
        loaded = self.connector.take_loaded()
        self.take_report()
        return loaded

    def take_report(self) -> None:
        report = self.connector.take_report()
        if report is not None:
            self.report = self.report.merged(report)

    def settle(self):
        """Let everything finish; returns what was loaded meanwhile."""
        assert self.thread.wait_idle(SOON)
        loaded = self.connector.take_loaded()
        self.take_report()
        return loaded

    def outcomes(self, order: Transfer) -> dict[str, list[Outcome]]:
        return {
            c.hop: [Outcome(int(value)) for value in c.outcomes]
            for c in self.report.completions
            if c.job_id == order.job_id
        }

    def offloaded(self, *numbers: int) -> list:
        """Offload blocks to the slots of their numbers, and wipe them."""
        keys = keys_of(*numbers)
        self.rank.fill(numbers, keys)
        self.step(after=(self.rank.orders.offload(keys, numbers, numbers),))
        self.settle()
        self.rank.fill(numbers, keys_of(*(100 + n for n in numbers)))
        return keys


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(**options) -> Worker:
        options.setdefault("make_copier", HostCopier)
        workers.append(Worker(FakeRank(**options)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.rank.device.settle()
        for store in worker.rank.stores.values():
            if isinstance(store, HeldStore):
                store.release()
        worker.connector.close()
        assert not worker.thread.alive


@pytest.fixture
def worker(make_worker) -> Worker:
    return make_worker()


def copy_all(worker: Worker) -> None:
    """Let the device copy until nothing is left to do."""
    while not worker.thread.wait_idle(0.001):
        worker.rank.device.step()


def copy_three(device: FakeDevice) -> None:
    """Copy two pieces that run and what was put behind them, once all of these are queued."""
    while device.num_copies(Direction.GATHER) < 3:
        time.sleep(0.0005)
    for _ in range(3):
        device.step()


def held(slab: Slab):
    return {"m": HeldStore(MemoryStore(slab, 2**24))}


def faulty(slab: Slab):
    return {"m": FaultyStore(MemoryStore(slab, 2**24), slab)}


def stores(slab: Slab):
    return {name: MemoryStore(slab, 2**24) for name in "mn"}


# The order of a step


def test_offload_after_the_forward_pass_has_what_it_computed(worker):
    order = worker.rank.orders.offload([A], [0], [0])
    worker.step(lambda: worker.rank.fill([0], [A]), after=(order,))
    worker.settle()
    worker.step(before=(worker.rank.orders.reload([A], [5], [0]),))
    worker.settle()
    assert worker.rank.holds(5, A)
    assert worker.outcomes(order) == {DRAM: [OK]}


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


# Loads


def test_asynchronous_load_is_reported_exactly_once(worker):
    keys = worker.offloaded(0, 1)
    order = worker.rank.orders.reload(keys, [5, 6], [0, 1])
    loaded = [worker.step(before=(order,)), worker.settle(), worker.step(), worker.settle()]
    assert [each.request_ids for each in loaded if each.request_ids] == [{order.request_id}]
    assert all(map(worker.rank.holds, [5, 6], keys))


def test_load_that_runs_over_several_steps_is_reported_when_it_is_over(make_worker):
    worker = make_worker(make_stores=held)
    order = worker.rank.orders.reload([A], [5], sources=1, window=[4])
    assert worker.step(before=(order,)).request_ids == set()
    assert worker.step().request_ids == set()
    deadline = time.monotonic() + SOON
    while not worker.rank.stores["m"].release():
        assert time.monotonic() < deadline
    loaded = worker.settle()
    assert loaded.request_ids == loaded.failed_requests == {order.request_id}
    assert loaded.failed_blocks == {5}
    assert worker.step().request_ids == set()


def test_failed_blocks_are_named(worker):
    keys = worker.offloaded(0, 1, 2)
    order = worker.rank.orders.reload([keys[0], D, keys[2]], [5, 6, 7], [0, 1, 2])
    during, after = worker.step(before=(order,)), worker.settle()
    assert worker.outcomes(order) == {HBM: [OK, Outcome.STALE, OK]}
    assert during.failed_blocks | after.failed_blocks == {6}


def test_failures_of_all_loads_of_a_step_are_told_together(worker):
    good = worker.offloaded(0)
    orders = [
        worker.rank.orders.reload(good, [4], [0]),
        worker.rank.orders.reload([B], [5], [1]),
        worker.rank.orders.reload([C], [6], [2]),
    ]
    worker.connector.begin_step(worker.orders(before=tuple(orders)))
    assert worker.thread.wait_idle(SOON)
    worker.connector.end_step()
    loaded = worker.connector.take_loaded()
    assert loaded.request_ids == {order.request_id for order in orders}
    assert loaded.failed_requests == {order.request_id for order in orders[1:]}
    assert loaded.failed_blocks == {5, 6}
    assert worker.connector.take_loaded().failed_blocks == set()


def test_load_in_step_is_there_when_it_returns(worker):
    keys = worker.offloaded(*range(4))
    for _ in range(50):
        worker.rank.fill([4, 5, 6, 7], keys_of(50, 51, 52, 53))
        order = worker.rank.orders.reload(keys, [4, 5, 6, 7], [0, 1, 2, 3])
        worker.connector.begin_step(worker.orders(before=(order,), sync_loads=(order.job_id,)))
        worker.connector.load_in_step()
        assert all(map(worker.rank.holds, [4, 5, 6, 7], keys))
        worker.connector.end_step()
        loaded = worker.connector.take_loaded()
        assert loaded.request_ids == set(), "nobody waits for it between steps"
        assert loaded.failed_blocks == set()


def test_failed_load_in_step_refuses_what_the_step_would_offload(make_worker):
    """It was computed on blocks that never came: on every hop, and no slot is touched."""
    worker = make_worker(make_stores=stores)
    rank = worker.rank
    reload = rank.orders.reload([A], [5], [0])
    offload = rank.orders.offload([B, C], [1, 2], [1, 2])
    offload.targets[:] = [0b10, 0b00]
    before = bytes(rank.slab.view(1))
    loaded = worker.step(before=(reload,), sync_loads=(reload.job_id,), after=(offload,))
    assert loaded.failed_blocks == {5}
    assert loaded.request_ids == loaded.failed_requests == set()
    worker.settle()
    failed = [Outcome.FAILED] * 2
    assert worker.outcomes(offload) == {DRAM: failed, "n": failed}
    answers = [c for c in worker.report.completions if c.job_id == offload.job_id]
    assert [c.last for c in answers] == [False, True]
    assert bytes(rank.slab.view(1)) == before

    again = rank.orders.offload([B], [1], [1])
    worker.step(lambda: rank.fill([1], [B]), after=(again,))
    worker.settle()
    assert worker.outcomes(again) == {DRAM: [OK]}, "the next step offloads again"


def test_failed_asynchronous_load_refuses_nothing(worker):
    offload = worker.rank.orders.offload([B], [1], [1])
    worker.step(before=(worker.rank.orders.reload([A], [5], [0]),), after=(offload,))
    worker.settle()
    assert worker.outcomes(offload) == {DRAM: [OK]}


def test_forward_pass_over_a_load_that_nobody_ordered_is_refused(worker):
    """Wrong tokens are worse than no tokens."""
    with pytest.raises(ProtocolError, match="77"):
        worker.connector.begin_step(worker.orders(sync_loads=(77,)))


# Malformed orders


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_forward_pass_over_a_load_whose_thread_has_died_is_refused(make_worker, monkeypatch):
    """It would compute on blocks that nobody loaded."""
    worker = make_worker()
    died = threading.Event()

    def die() -> bool:
        died.set()
        raise SystemExit

    monkeypatch.setattr(worker.rank.executor, "advance", die)
    load = worker.rank.orders.reload([A], [0], [0])
    worker.connector.begin_step(worker.orders(before=(load,), sync_loads=(load.job_id,)))
    assert died.wait(SOON)
    with pytest.raises(ProtocolError, match="executor stopped"):
        worker.connector.load_in_step()


def test_malformed_orders_come_back_failed(worker, caplog):
    rank = worker.rank
    reload = rank.orders.reload([A], [5], [99])
    offload = rank.orders.offload([B], [1], [99])
    with caplog.at_level(logging.ERROR):
        loaded = worker.step(
            before=(reload,), after=(offload,), forgets=(Forget.of("nowhere", [A]),)
        )
    assert loaded.request_ids == loaded.failed_requests == {reload.request_id}
    assert loaded.failed_blocks == {5}
    worker.settle()
    assert worker.outcomes(reload) == {HBM: [Outcome.FAILED]}
    assert worker.outcomes(offload) == {DRAM: [Outcome.FAILED]}
    assert all(completion.last for completion in worker.report.completions)
    assert worker.report.counters == {"orders_refused": 3}
    assert "slot 99" in caplog.text


def test_malformed_load_in_step_refuses_what_the_step_would_offload(worker):
    reload = worker.rank.orders.reload([A], [5], [99])
    offload = worker.rank.orders.offload([B], [1], [1])
    loaded = worker.step(before=(reload,), sync_loads=(reload.job_id,), after=(offload,))
    assert loaded.failed_blocks == {5}
    worker.settle()
    assert worker.outcomes(offload) == {DRAM: [Outcome.FAILED]}


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
