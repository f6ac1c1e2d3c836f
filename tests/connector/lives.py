"""Engines and scheduler's sides for tests of what happens to a request."""

from __future__ import annotations

import random

import numpy as np

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.step import Step
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.model.config import parse_mapping
from kvtiers.model.keys import Rank
from kvtiers.model.messages import DRAM, HBM, Completion, Hello, StepOrders, WorkerReport
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_engine import FakeEngine, Setup

ALWAYS = {"cost": {"mode": "always"}}
SLOT = 2**20


def fake(setup: Setup = Setup(num_slots=200, options=ALWAYS), seed: int = 1) -> FakeEngine:  # noqa: B008
    return FakeEngine(setup, random.Random(seed))


def forget_hbm(engine: FakeEngine) -> None:
    assert engine.scheduler.pool.reset_cache()


def count(connector: SchedulerConnector, name: str, *labels: str) -> float:
    return connector.counters.value(f"kvtiers_{name}", labels)


class Told:
    """A scheduler's side whose engine and rank are told what to do, block by block."""

    def __init__(self, block_size: int = 16, num_slots: int = 64, **config: object) -> None:
        options = {"tiers": [{"kind": "dram", "capacity": f"{num_slots}MiB"}], **ALWAYS, **config}
        shape = EngineShape(block_size, (None,), 1, None, 8192, PrefillSpeed(0.005, 1e12))
        self.connector = SchedulerConnector(parse_mapping(options), shape)
        self.connector.connect([Hello(Rank(), bytes(32), num_slots, SLOT, (SLOT,), False)])
        self.block_size = block_size

    def hashes(self, num: int, name: str = "p") -> list[bytes]:
        return [f"{name}{i}".encode().ljust(32, b".") for i in range(num)]

    def step(
        self,
        computed: dict[str, int] | None = None,
        preempted: tuple[str, ...] = (),
        **more: object,
    ):
        return self.connector.schedule(
            Step(computed or {}, (), preempted, lambda _: (list(range(100, 200)),), 1, **more)
        )

    def answer(self, orders: StepOrders, outcome: Outcome = Outcome.OK) -> None:
        completions = []
        for transfer in (*orders.before, *orders.after):
            hop = HBM if transfer.request_id else DRAM
            outcomes = np.full(transfer.num_blocks, outcome, np.uint8)
            completions.append(
                Completion(transfer.job_id, orders.epoch, Rank(), hop, outcomes, last=True)
            )
        self.connector.reported(WorkerReport(tuple(completions)))

    def store(self, num_blocks: int, name: str = "p") -> None:
        """Compute a prompt of whole blocks in one step."""
        self.connector.arrived("first", self.hashes(num_blocks, name))
        self.answer(self.step({"first": num_blocks * self.block_size}))
        self.connector.finished("first", ([],))
