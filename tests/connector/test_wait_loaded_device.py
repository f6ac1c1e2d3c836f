"""A device that only queues its work waits for loads itself, and the host goes on."""

import threading
from collections.abc import Iterator

import pytest
from layer_loads import BLOCKS, GROUPS, KEYS, NUM_RANGES, SOON

from kvtiers.connector.worker import ALL_GROUPS, WorkerConnector
from kvtiers.data.copier import Direction
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import Rank, block_key, group_of
from kvtiers.model.messages import Hello, StepOrders
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FINGERPRINT, FakeRank, make_layout


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
        names = [block_key(bytes(32), group) for group in GROUPS]
        self.rank.device.queue(lambda: self.rank.fill(BLOCKS, names))

    def compute(self, group: int) -> None:
        """Queue the layers of a range: they read its blocks."""
        rows = [row for row, key in enumerate(KEYS) if group_of(key) == group]
        holds = self.rank.holds
        work = lambda: self.read.append([holds(BLOCKS[r], KEYS[r]) for r in rows])  # noqa: E731
        self.rank.device.queue(work)

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


def test_each_batch_holds_the_device_once(device, monkeypatch):
    """It is a call of the driver, between two layers."""
    held = []
    hold_engine = device.rank.device.hold_engine
    monkeypatch.setattr(
        device.rank.device, "hold_engine", lambda ticket: held.append(ticket) or hold_engine(ticket)
    )
    device.begin()
    device.worker.load_in_step()
    assert len(held) == len(set(held)) == NUM_RANGES
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
