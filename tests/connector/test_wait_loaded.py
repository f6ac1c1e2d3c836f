"""An engine that needs the first layers' KV first waits for one reload of several."""

import threading
from collections.abc import Iterator

import pytest

from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.memory_store import MemoryStore
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello, StepOrders
from kvtiers.testing.fake_rank import FINGERPRINT, FakeRank, keys_of
from kvtiers.testing.faults import HeldStore

A, B = keys_of(1, 2)


@pytest.fixture
def rank() -> FakeRank:
    return FakeRank(
        make_copier=HostCopier,
        make_stores=lambda slab: {"m": HeldStore(MemoryStore(slab, 2**24))},
    )


@pytest.fixture
def worker(rank) -> Iterator[WorkerConnector]:
    hello = Hello(Rank(), FINGERPRINT, 8, rank.slab.slot_nbytes, (192,), pinned=False)
    worker = WorkerConnector(hello, ExecutorThread(rank.executor), rank.copier.mark)
    yield worker
    rank.stores["m"].release()
    worker.close()


def test_it_waits_for_what_is_named_and_for_nothing_else(rank, worker):
    first = rank.orders.reload([A], [0], sources=1, window=[6])
    second = rank.orders.reload([B], [1], sources=1, window=[7])
    worker.begin_step(StepOrders(worker.next_step, 0, before=(first, second)))
    store = rank.stores["m"]
    while store.num_held < 2:
        pass
    come = threading.Event()

    def wait() -> None:
        worker.wait_loaded([first.job_id])
        come.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not come.wait(0.05)  # nothing has come
    store.release(1)  # the second is still on its way
    assert come.wait(30.0)
    waiting.join()
    assert store.num_held == 1
    assert worker.take_loaded().request_ids == {first.request_id}


def test_steps_number_themselves(worker):
    first = worker.next_step
    worker.begin_step(StepOrders(first, 0))
    assert worker.next_step == first + 1


def test_a_stopped_executor_is_no_answer(rank, worker, monkeypatch):
    monkeypatch.setattr(ExecutorThread, "wait_loaded", lambda self, job_ids, seconds: False)
    with pytest.raises(ProtocolError, match="stopped before it had settled"):
        worker.wait_loaded([7])
