"""A worker's side of the connector over a pretended rank, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier import Direction
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.model.keys import Rank
from kvtiers.model.messages import (
    Hello,
    StepOrders,
    Transfer,
    WorkerReport,
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
