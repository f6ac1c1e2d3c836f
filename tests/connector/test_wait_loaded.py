"""A forward pass waits for one range of layers after the other, and for nothing else."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvtiers.connector.worker import ALL_GROUPS, WorkerConnector
from kvtiers.data.copier import Direction
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

NUM_RANGES = 3
HASHES = [bytes([i]) * 32 for i in (1, 2)]
KEYS = [block_key(one, group) for group in range(NUM_RANGES) for one in HASHES]  # range by range
GROUPS = [group_of(key) for key in KEYS]
BLOCKS = [4, 5] * NUM_RANGES
SOON = 30.0  # seconds; a limit that only a failure reaches


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


class Device:
    """A rank whose engine only queues its work, and a step that reads a load from DRAM."""

    def __init__(self) -> None:
        self.rank = rank = FakeRank(make_layout(8, ((96,),) * NUM_RANGES), 12)
        payload = tuple(group.payload_nbytes for group in rank.layout.groups)
        hello = Hello(Rank(), FINGERPRINT, 12, rank.slab.slot_nbytes, payload, pinned=False)
        self.thread = ExecutorThread(rank.executor)
        self.worker = WorkerConnector(hello, self.thread, rank.copier.mark)
        rank.fill(BLOCKS, KEYS)
        order = rank.orders.offload(KEYS, BLOCKS, range(len(KEYS)))
        self.worker.begin_step(StepOrders(1, 0, before=(order,)))
        while not self.thread.wait_idle(0.001):
            rank.device.step()
        self.worker.end_step()
        self.worker.take_report()
        rank.fill(BLOCKS, [block_key(bytes(32), group_of(key)) for key in KEYS])
        self.load = rank.orders.reload(KEYS, BLOCKS, range(len(KEYS)))
        self.read: list[list[bool]] = []  # of each range, whether its blocks were right

    def begin(self, *, load: bool = True) -> None:
        orders = StepOrders(2, 0, before=(self.load,), sync_loads=(self.load.job_id,))
        self.worker.begin_step(orders, load=load)

    def clear(self) -> None:
        """Queue what an engine does to new blocks."""
        self._queue(lambda: self.rank.fill(BLOCKS, [block_key(bytes(32), g) for g in GROUPS]))

    def compute(self, group: int) -> None:
        """Queue the layers of a range: they read its blocks."""
        rows = [row for row, key in enumerate(KEYS) if group_of(key) == group]
        holds = self.rank.holds
        self._queue(lambda: self.read.append([holds(BLOCKS[r], KEYS[r]) for r in rows]))

    def _queue(self, work: Callable[[], None]) -> None:
        with self.rank.device._lock:
            self.rank.device._work.append(work)
            self.rank.device._num_queued += 1

    def end(self) -> set[int]:
        """End the step while the device runs; returns the blocks that did not come."""
        ended = threading.Event()
        threading.Thread(target=lambda: (self.worker.end_step(), ended.set()), daemon=True).start()
        while not ended.wait(0.001):
            self.rank.device.step()
            self.rank.device.work()
        self.rank.device.settle()
        return set(self.worker.take_loaded().failed_blocks)


@pytest.fixture
def device() -> Iterator[Device]:
    it = Device()
    yield it
    it.rank.device.settle()
    it.worker.close()


@pytest.mark.parametrize("groups", [(0, 1, 2), (2,), (ALL_GROUPS,)])
def test_a_device_waits_for_copies_and_the_host_does_not(device, groups):
    device.begin()
    for group in groups:
        device.worker.load_in_step(group)
    for group in range(NUM_RANGES):
        device.compute(group)
    device.rank.device.work()
    assert device.read == [], "no copy has run yet, and the engine is queued behind them"
    assert device.end() == set()
    assert device.read == [[True, True]] * NUM_RANGES


@pytest.mark.parametrize("says_so", [True, False])
def test_an_engine_may_clear_blocks_before_their_loads_begin(device, says_so):
    """Loads come after all that is queued when it comes again, and with its first layer at last."""
    device.begin(load=False)
    device.clear()
    assert device.thread.wait_idle(SOON), "nothing has begun"
    if says_so:
        device.begin()
        device.begin()
    device.worker.load_in_step()
    for group in range(NUM_RANGES):
        device.compute(group)
    assert device.end() == set()
    assert device.read == [[True, True]] * NUM_RANGES


def test_loads_begin_with_the_end_of_the_step_at_last(device):
    device.worker.begin_step(StepOrders(2, 0, before=(device.load,)), load=False)
    device.worker.end_step()
    while not device.thread.wait_idle(0.001):
        device.rank.device.step()
    assert device.worker.take_loaded().request_ids == {device.load.request_id}
    assert device.rank.holds(BLOCKS[0], KEYS[0])


def test_a_range_is_held_by_its_own_copies_only(device):
    """Its layers run while those of the next are still copied."""
    device.begin()
    device.worker.load_in_step(0)
    device.compute(0)
    while not device.rank.device.step():
        pass
    device.rank.device.work()
    assert device.read == [[True, True]]
    assert device.rank.device.num_copies(Direction.SCATTER) == 2
    assert device.end() == set()


def test_without_the_wait_the_engine_would_read_wrong_bytes(device):
    device.begin()
    device.worker.load_in_step(0)
    device.compute(1)
    device.rank.device.step()
    device.rank.device.work()
    assert device.read == [[False, False]]


def test_a_copy_that_fails_after_the_engine_was_held_is_told_at_the_end_of_the_step(device):
    """The engine has run on what was there; all that it made of it is refused."""
    device.rank.device.fail_copy(OSError("bus"))
    device.begin()
    device.worker.load_in_step(NUM_RANGES - 1)
    device.compute(0)
    offload = device.rank.orders.offload([KEYS[0]], [6], [0])
    device.worker._orders = StepOrders(2, 0, after=(offload,))
    assert device.end() == set(BLOCKS)
    assert device.read == [[False, False]]
    (refused,) = [c for c in device.worker.take_report().completions if c.job_id == offload.job_id]
    assert refused.outcomes.tolist() == [Outcome.FAILED]


def test_loads_that_are_taken_before_the_end_of_the_step_are_settled_first(device):
    """So vLLM does with speculative decoding: the step's tokens go out before its end."""
    device.rank.device.fail_copy(OSError("bus"))
    device.begin()
    device.worker.load_in_step()
    taken = []
    take = threading.Thread(target=lambda: taken.append(device.worker.take_loaded()), daemon=True)
    take.start()
    take.join(0.03)
    assert not taken, "its copies still run"
    while not taken:
        device.rank.device.step()
        take.join(0.001)
    assert taken[0].failed_blocks == set(BLOCKS)
    (told,) = device.worker.take_report().completions
    assert told.job_id == device.load.job_id
    offload = device.rank.orders.offload([KEYS[0]], [6], [0])
    device.worker._orders = StepOrders(2, 0, after=(offload,))
    assert device.end() == set()
    (refused,) = device.worker.take_report().completions
    assert refused.outcomes.tolist() == [Outcome.FAILED]


def test_loads_that_are_taken_need_an_executor_that_runs(device, monkeypatch):
    device.begin()
    device.worker.load_in_step()
    monkeypatch.setattr(device.thread, "wait_loaded", lambda job_ids, seconds: False)
    with pytest.raises(ProtocolError, match=r"had settled reloads \[\d+\]"):
        device.worker.take_loaded()


def test_the_engine_is_held_once_by_each_copy(device, monkeypatch):
    held, hold = [], device.rank.device.hold_engine
    monkeypatch.setattr(
        device.rank.device, "hold_engine", lambda ticket: (held.append(ticket), hold(ticket))[1]
    )
    device.begin()
    device.worker.load_in_step()
    assert len(held) == len(set(held)) == NUM_RANGES
    assert device.end() == set()


@pytest.mark.parametrize("answer", [False, RuntimeError("lost")])
def test_where_the_device_cannot_wait_the_host_does(device, monkeypatch, answer):
    def hold_engine(ticket):
        if answer is False:
            return False
        raise answer

    monkeypatch.setattr(device.rank.device, "hold_engine", hold_engine)
    device.begin()
    over = threading.Event()
    wait = threading.Thread(target=lambda: (device.worker.load_in_step(1), over.set()), daemon=True)
    wait.start()
    assert not over.wait(0.03)
    while not over.wait(0.001):
        device.rank.device.step()
    assert device.rank.holds(BLOCKS[0], KEYS[0])
    assert device.rank.holds(BLOCKS[2], KEYS[2])


def test_a_block_that_still_lands_is_waited_for_by_the_host(device):
    """There is no copy yet that the device could wait for."""
    device.worker.begin_step(StepOrders(2, 0))
    device.worker.end_step()
    rank, key = device.rank, KEYS[0]
    landing = rank.orders.offload([key], [4], [11])
    load = rank.orders.reload([key], [5], [11])
    orders = StepOrders(3, 0, before=(landing, load), sync_loads=(load.job_id,))
    rank.fill([4], [key])
    device.worker.begin_step(orders)
    over = threading.Event()
    threading.Thread(target=lambda: (device.worker.load_in_step(), over.set()), daemon=True).start()
    assert not over.wait(0.03)
    while not rank.device.step(Direction.GATHER):
        pass
    assert over.wait(SOON), "the load is queued, and not copied"
    assert not rank.holds(5, key)
    assert device.end() == set()
    assert rank.holds(5, key)
