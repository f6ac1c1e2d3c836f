"""The thread that advances an executor: it lets nobody wait for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from ranks import OK, ROOMY, memory

from kvtiers.data.copier import Direction
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor import Executor
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.file_orders import Order, Verb, is_answered, leave_order
from kvtiers.data.file_settings import FileStoreSettings
from kvtiers.data.file_store import FileStore
from kvtiers.data.memory_store import MemoryStore
from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import DRAM, HBM, JobId
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of
from kvtiers.testing.faults import FaultyStore, HeldStore

SOON = 30.0  # seconds; a limit that only a failure reaches


class Stand:
    """A rank whose executor has a thread, with answers by job."""

    def __init__(self, rank: FakeRank, executor: Executor | None = None) -> None:
        self.rank = rank
        self.thread = ExecutorThread(executor or rank.executor)

    def submit(self, order) -> JobId:
        self.thread.submit(order, self.rank.copier.mark())
        return order.job_id

    def outcomes(self, job_id: JobId) -> dict[str, list[Outcome]]:
        self.rank.answers += self.thread.poll()
        return self.rank.outcomes(job_id)

    def run(self, order) -> dict[str, list[Outcome]]:
        job_id = self.submit(order)
        assert self.thread.wait_idle(SOON)
        return self.outcomes(job_id)


def until(condition: Callable[[], object]) -> None:
    """Poll a condition that another thread brings about."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.0005)


@pytest.fixture
def stand() -> Iterator[Callable[..., Stand]]:
    """Make stands with a host copier, closed after the test."""
    stands: list[Stand] = []

    def make(executor_of: Callable[[FakeRank], Executor] | None = None, **options) -> Stand:
        options.setdefault("make_copier", HostCopier)
        rank = FakeRank(options.pop("layout", None), options.pop("num_slots", 8), **options)
        stands.append(Stand(rank, executor_of(rank) if executor_of else None))
        return stands[-1]

    yield make
    for each in stands:
        each.rank.device.settle()
        for store in each.rank.stores.values():
            if isinstance(store, HeldStore):
                store.release()
        each.thread.close()
        assert not each.thread.alive


def held(slab):
    return {"m": HeldStore(MemoryStore(slab, ROOMY))}


def faulty(slab):
    return {"m": FaultyStore(MemoryStore(slab, ROOMY), slab)}


# Work


def test_chains_are_bit_exact_with_the_real_copier(stand):
    it = stand(make_stores=memory("m"), layout=make_layout(300, [[96, 640], [4098]]), num_slots=300)
    keys = keys_of(*range(100)) + keys_of(*range(100, 200), group=1)
    it.rank.fill(range(200), keys)
    answers = it.run(it.rank.orders.offload(keys, range(200), range(200), 1))
    assert answers == {DRAM: [OK] * 200, "m": [OK] * 200}
    it.rank.fill(range(200), keys[100:] + keys[:100])
    first = it.submit(it.rank.orders.reload(keys, range(200), range(200)))
    targets = [*range(200, 300), *range(100)]
    assert it.thread.wait_loaded([first], SOON)
    assert all(map(it.rank.holds, range(200), keys))
    assert it.run(it.rank.orders.reload(keys, targets, sources=1, window=[250])) == {
        HBM: [OK] * 200
    }
    assert all(map(it.rank.holds, targets, keys))
    assert {link.name for link in it.thread.take_links()} == {
        "hbm>dram",
        "dram>hbm",
        "dram>m",
        "m>dram",
    }


@pytest.mark.alone
def test_order_wakes_a_sleeping_thread(stand):
    """An idle thread sleeps for longer than any of these orders takes."""
    it = stand()
    it.rank.fill([0], keys_of(1))
    it.run(it.rank.orders.offload(keys_of(1), [0], [0]))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        job = it.submit(it.rank.orders.reload(keys_of(1), [5], [0]))
        assert it.thread.wait_loaded([job], SOON)
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[10] < 0.02


def test_an_idle_rank_carries_out_what_is_ordered_from_outside(stand, tmp_path):
    """Of a file store, whose owner alone may change it; control learns by MISSING."""
    settings = FileStoreSettings((tmp_path,), 2**22)
    it = stand(make_stores=lambda slab: {"m": FileStore(slab, settings)})
    it.rank.fill(range(4), keys_of(*range(4)))
    it.run(it.rank.orders.offload(keys_of(*range(4)), range(4), range(4), 1))
    (lock,) = tmp_path.glob("*/*/owner.lock")
    leave_order(lock.parent, Order(Verb.CLEAR, time.time() + SOON))
    until(lambda: is_answered(lock.parent))
    answers = it.run(it.rank.orders.reload(keys_of(1, 2), [5, 6], sources=1, window=[7]))
    assert answers == {HBM: [Outcome.MISSING] * 2}


def test_order_wakes_a_thread_that_waits_for_a_store(stand):
    it = stand(make_stores=held)
    it.submit(it.rank.orders.reload(keys_of(9), [7], sources=1, window=[7]))
    until(lambda: it.rank.stores["m"].num_held)
    it.rank.fill([0], keys_of(1))
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    assert it.thread.wait_read({job: [0]}, SOON)
    assert it.outcomes(job) == {DRAM: [OK]}


def test_thread_that_waits_for_a_store_polls_it_ever_less_often(stand):
    """From every 0.2 ms to every 2 ms: a hung store costs no core."""
    it = stand(make_stores=lambda slab: {"m": FaultyStore(HeldStore(MemoryStore(slab, 1)), slab)})
    store = it.rank.stores["m"]
    it.submit(it.rank.orders.reload(keys_of(9), [7], sources=1, window=[7]))
    until(lambda: store.calls["get"])
    calls, started = store.calls["poll"], time.monotonic()
    until(lambda: time.monotonic() - started > 0.2)
    polled, elapsed = store.calls["poll"] - calls, time.monotonic() - started
    # Two polls a turn, a few short pauses first, and what a timer may be early.
    assert 0 < polled <= 1.5 * 2 * elapsed / 0.002 + 20
    store.inner.release()


# Fences


def test_fence_returns_once_everything_is_read(stand):
    it = stand()
    it.rank.fill([0], keys_of(1))
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    assert it.thread.wait_read({job: [0]}, SOON)
    it.rank.fill([0], keys_of(2))
    assert it.run(it.rank.orders.reload(keys_of(1), [5], [0])) == {HBM: [OK]}
    assert it.rank.holds(5, keys_of(1)[0])


def test_fence_drops_what_a_stuck_copier_has_not_begun_and_waits_for_what_runs(stand):
    it = stand(make_copier=None, piece_nbytes=1)
    device = it.rank.device
    it.rank.fill([0, 1], keys_of(1, 2))
    device.fail_submit(OSError("busy"))  # one of two blocks is refused, the other runs
    running = it.submit(it.rank.orders.offload(keys_of(1, 2), [0, 1], [0, 1]))
    until(lambda: device.num_copies(Direction.GATHER) == 1)
    done = threading.Event()
    result = []

    def fence() -> None:
        result.append(it.thread.wait_read({running: [0, 1]}, 0.01))
        done.set()

    waiter = threading.Thread(target=fence)
    waiter.start()
    assert not done.wait(0.1), "the copy that runs still reads its block"
    device.step()
    assert done.wait(SOON)
    waiter.join()
    assert result == [False]
    [outcomes] = it.outcomes(running).values()
    assert sorted(outcomes) == [OK, Outcome.FAILED]


def test_fence_drops_an_offload_that_waits_behind_another(stand):
    it = stand(make_copier=None, executor_of=Sluggish)
    it.rank.fill([0], keys_of(1))
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    assert it.thread.wait_read({job: [0]}, 0.01) is False
    assert it.outcomes(job) == {DRAM: [Outcome.TIMED_OUT]}
    assert it.rank.device.num_tickets == 0


class Sluggish(Executor):
    """Never begins a gather, as if others were before it all the time."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__(rank.shop)
        self._offloads.begin_gather = lambda: False
        self._offloads.begin_hurried = lambda: False


def test_waits_are_bounded(stand):
    it = stand(make_copier=None)
    it.rank.fill([0], keys_of(1))
    it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    reload = it.submit(it.rank.orders.reload(keys_of(1), [5], [0]))
    assert it.thread.wait_loaded([reload], 0.01) is False
    assert it.thread.wait_idle(0.01) is False
    assert it.thread.wait_loaded([JobId(999)], 0.0) is True


def test_load_in_a_hung_store_ends_at_its_deadline(stand):
    """By the clock of the executor; its thread need not be woken."""
    it = stand(make_stores=held)
    it.rank.shop.clock = time.monotonic
    job = it.submit(it.rank.orders.reload(keys_of(1), [5], [4], 1, deadline=0.05))
    assert it.thread.wait_loaded([job], SOON)
    assert it.outcomes(job) == {HBM: [Outcome.TIMED_OUT]}
    assert it.thread.wait_idle(0.0) is False
    it.rank.stores["m"].release()
    assert it.thread.wait_idle(SOON)
    it.outcomes(job)
    assert it.rank.completions(job)[-1].last


# Errors


@pytest.mark.parametrize("error", [OSError(28, "no space"), ValueError("bug")])
def test_store_that_raises_leaves_the_thread_alive(stand, error):
    """R60: the 3rd of 100."""
    it = stand(make_stores=faulty)
    it.rank.stores["m"].fail("put", error, on=3)
    outcomes = []
    for n in range(100):
        it.rank.fill([0], keys_of(n))
        outcomes += it.run(it.rank.orders.offload(keys_of(n), [0], [0], 1))["m"]
    assert outcomes == [OK, OK, Outcome.FAILED] + [OK] * 97
    assert it.thread.alive
    assert len(it.rank.stores["m"].keys()) == 99


class CursedError(ValueError):
    pass


def test_error_that_nobody_foresaw_fails_what_runs_and_nothing_after(stand, caplog):
    """A copier may raise anything; no request waits for ever."""
    it = stand(make_copier=None)
    it.rank.device.fail_submit(CursedError())
    with caplog.at_level(logging.ERROR):
        reload = it.submit(it.rank.orders.offload(keys_of(1, 2), [0, 1], [0, 1]))
        assert it.thread.wait_read({reload: [0, 1]}, SOON)
    assert it.outcomes(reload) == {DRAM: [Outcome.FAILED] * 2}
    assert any("CursedError" in (record.exc_text or "") for record in caplog.records)
    it.rank.fill([3], keys_of(3))
    job = it.submit(it.rank.orders.offload(keys_of(3), [3], [3]))
    until(it.rank.device.step)
    assert it.thread.wait_read({job: [3]}, SOON)
    assert it.outcomes(job) == {DRAM: [OK]}
    assert it.thread.alive


def test_error_that_returns_at_every_turn_hangs_nobody(stand):
    it = stand(executor_of=Broken)
    job = it.submit(it.rank.orders.reload(keys_of(1), [5], [0]))
    assert it.thread.wait_loaded([job], SOON)
    assert it.outcomes(job) == {HBM: [Outcome.FAILED]}
    it.thread.close()
    assert not it.thread.alive


class Broken(Executor):
    """Accepts orders, then fails, at every turn."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__(rank.shop)

    def advance(self) -> bool:
        self._accept()
        raise CursedError


# The end


def test_close_answers_what_is_queued_and_waits_for_what_runs(stand):
    it = stand(make_copier=None)
    it.rank.fill([0], keys_of(1))
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    until(lambda: it.rank.device.num_copies(Direction.GATHER))
    it.thread.close()
    assert not it.thread.alive
    assert it.outcomes(job) == {DRAM: [Outcome.FAILED]}
    assert it.rank.device.num_tickets == 0


def test_close_twice(stand):
    it = stand()
    it.thread.close()
    it.thread.close()
    assert not it.thread.alive


def test_nobody_waits_for_a_closed_thread(stand):
    it = stand(make_copier=None)
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    it.thread.close()
    it.thread.wait_read({job: [0]}, SOON)
    it.thread.wait_loaded([job], None)
    with pytest.raises(ProtocolError, match="closed"):
        it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))


def test_close_leaves_the_memory_to_a_thread_that_hangs(stand, caplog):
    """Memory that a stuck call may still write is not unmapped."""
    gate, inside = threading.Event(), threading.Event()

    class Stuck(MemoryStore):
        def poll(self):
            inside.set()
            gate.wait()
            return super().poll()

    it = stand(make_stores=lambda slab: {"m": Stuck(slab, ROOMY)}, make_copier=None)
    job = it.submit(it.rank.orders.offload(keys_of(1), [0], [0]))
    assert inside.wait(SOON)
    it.thread.close(seconds=0.01)
    assert "did not stop" in caplog.text
    assert bytes(it.rank.slab.view(0)), "still mapped"
    gate.set()
    assert it.thread.wait_read({job: [0]}, 0.01) is False, "nobody reads any more, nobody waits"
    it.thread.close()
    assert not it.thread.alive
    with pytest.raises(ProtocolError, match="closed"):
        it.rank.slab.view(0)
