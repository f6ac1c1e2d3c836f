"""A forward pass waits for one range of layers after the other, and for nothing else: the host."""

import threading
from collections.abc import Iterator

import pytest
from layer_loads import BLOCKS, KEYS, NUM_RANGES, SOON

from kvtiers.connector.worker import ALL_GROUPS, WorkerConnector
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.memory_store import MemoryStore
from kvtiers.model.errors import ProtocolError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import Rank, block_key, group_of
from kvtiers.model.messages import Hello, StepOrders
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FINGERPRINT, FakeRank, make_layout
from kvtiers.testing.faults import FaultyStore, Flip, HeldStore


@pytest.fixture
def rank() -> FakeRank:
    """A rank whose store answers a frame at a time, when it is told to."""

    def stores(slab):
        return {"m": HeldStore(FaultyStore(MemoryStore(slab, 2**24), slab))}

    return FakeRank(make_layout(8, ((96,),) * NUM_RANGES), 12, stores, make_copier=HostCopier)


@pytest.fixture
def worker(rank) -> Iterator[WorkerConnector]:
    payload = tuple(group.payload_nbytes for group in rank.layout.groups)
    hello = Hello(Rank(), FINGERPRINT, 12, rank.slab.slot_nbytes, payload, pinned=False)
    worker = WorkerConnector(hello, ExecutorThread(rank.executor), rank.copier.mark)
    yield worker
    rank.stores["m"].release()
    worker.close()


class Step:
    """A step that reads a load of two blocks in three ranges, a frame at a time."""

    def __init__(self, rank: FakeRank, worker: WorkerConnector, **options) -> None:
        self.rank, self.worker, self.store = rank, worker, rank.stores["m"]
        self.number = 1
        for key, block in zip(KEYS, BLOCKS, strict=True):
            rank.device.fill(block, key, group_of(key))
        offload = rank.orders.offload(KEYS, BLOCKS, range(len(KEYS)), targets=1)
        worker.begin_step(StepOrders(1, 0, after=(offload,)))
        worker.end_step()
        while not self.store.num_held:
            pass
        while not self._idle():
            self.store.release()
        for key, block in zip(KEYS, BLOCKS, strict=True):
            rank.device.fill(block, block_key(bytes(32), group_of(key)), group_of(key))
        worker.take_report()
        # One slot to stage in: one frame is in the store at any time.
        self.load = rank.orders.reload(KEYS, BLOCKS, sources=1, window=[11], **options)
        orders = StepOrders(2, 0, before=(self.load,), sync_loads=(self.load.job_id,))
        worker.begin_step(orders)

    def _idle(self) -> bool:
        return self.rank.executor.idle

    def release(self, num: int) -> None:
        for _ in range(num):
            while not self.store.num_held:
                pass
            self.store.release(1)

    def waits_for(self, group: int) -> threading.Event:
        """Wait in a thread; what is returned is set when the wait is over."""
        over = threading.Event()

        def wait() -> None:
            self.worker.load_in_step(group)
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        return over

    def has(self, group: int) -> bool:
        """Whether the blocks of a range are in the engine."""
        return all(
            self.rank.holds(block, key)
            for block, key in zip(BLOCKS, KEYS, strict=True)
            if group_of(key) == group
        )


def test_a_step_waits_for_the_ranges_up_to_one_and_for_no_more(rank, worker):
    step = Step(rank, worker)
    for group in range(NUM_RANGES):
        over = step.waits_for(group)
        step.release(1)
        assert not over.wait(0.03), "half of the range is missing"
        step.release(1)
        assert over.wait(SOON)
        assert step.has(group)
        assert group == NUM_RANGES - 1 or not step.has(group + 1)
    worker.load_in_step(0)  # known: it asks nobody
    worker.end_step()
    loaded = worker.take_loaded()
    assert (loaded.request_ids, loaded.failed_blocks) == (frozenset(), frozenset())


def test_a_later_range_is_waited_for_with_those_before_it(rank, worker):
    step = Step(rank, worker)
    over = step.waits_for(1)
    step.release(3)
    assert not over.wait(0.03)
    step.release(1)
    assert over.wait(SOON)
    assert step.has(0)
    assert step.has(1)


def test_the_end_of_a_step_waits_for_what_no_layer_did(rank, worker):
    step = Step(rank, worker)
    ended = threading.Event()
    threading.Thread(target=lambda: (worker.end_step(), ended.set()), daemon=True).start()
    step.release(5)
    assert not ended.wait(0.03)
    step.release(1)
    assert ended.wait(SOON)


@pytest.mark.parametrize("row", range(len(KEYS)))
def test_a_frame_that_is_spoilt_in_mid_forward_names_its_block(rank, worker, row):
    step = Step(rank, worker)
    faults = rank.stores["m"].inner
    faults.fail("get", Flip(FrameFormat.of(rank.layout.groups[0]).header_nbytes + 5), on=row + 1)
    step.release(len(KEYS))
    for group in range(NUM_RANGES):
        worker.load_in_step(group)
    offload = rank.orders.offload([KEYS[0]], [6], [0])
    worker._orders = StepOrders(2, 0, after=(offload,))
    worker.end_step()
    assert worker.take_loaded().failed_blocks == {BLOCKS[row]}
    (refused,) = [c for c in worker.take_report().completions if c.job_id == offload.job_id]
    assert refused.outcomes.tolist() == [Outcome.FAILED]  # computed on a block that never came


def test_a_load_that_hangs_is_given_up_at_its_deadline_in_mid_forward(rank, worker):
    step = Step(rank, worker, deadline=1.0)
    step.release(2)
    worker.load_in_step(0)
    over = step.waits_for(2)
    assert not over.wait(0.03)
    rank.clock.advance(2.0)
    assert over.wait(SOON)
    worker.end_step()
    assert worker.take_loaded().failed_blocks == set(BLOCKS)


def test_a_step_without_loads_waits_for_nothing(worker, monkeypatch):
    monkeypatch.setattr(ExecutorThread, "hold_engine", None)
    monkeypatch.setattr(ExecutorThread, "wait_loaded", None)
    worker.begin_step(StepOrders(1, 0, num_scheduled_tokens=1))
    worker.load_in_step(2)
    worker.load_in_step(ALL_GROUPS)
    worker.end_step()


def test_a_stopped_executor_is_no_answer(rank, worker, monkeypatch):
    step = Step(rank, worker)
    monkeypatch.setattr(ExecutorThread, "hold_engine", lambda self, job_ids, group: False)
    with pytest.raises(ProtocolError, match="stopped before KV group 1"):
        worker.load_in_step(1)
    step.release(len(KEYS))
