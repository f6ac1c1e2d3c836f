"""A whole fake engine around the engine-neutral connector, and random work for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.stores import RankStores
from kvtiers.control.tier import Residence
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.data.copier import Direction
from kvtiers.data.slab import Slab
from kvtiers.model.config import parse_mapping
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import BlockKey, Rank, block_keys, group_of, prefix_hash_chain
from kvtiers.model.layer_ranges import layer_ranges
from kvtiers.testing.fake_rank import FakeClock
from kvtiers.testing.fake_request import NUM_LAYERS, NUM_TOKEN_IDS, FakeRequest, UInt64s
from kvtiers.testing.fake_scheduler import FakeScheduler
from kvtiers.testing.fake_step import EngineSettings, Execution
from kvtiers.testing.fake_worker import FakeRunner, FakeWorker, token_layout
from kvtiers.testing.invariants import check_controller, check_empty, check_quiet
from kvtiers.testing.neutral_connector import NeutralConnector

MAX_DRAIN_STEPS = 2000
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine and its tiers.

    Attributes:
        num_slots: of the slab. store_blocks: capacity of a memory store below it, 0 for none.
        num_layer_ranges: KV groups that the layers make; a step waits for one after the other.
        options: more of the configuration, such as ``{"policy": {"offload": "lazy"}}``.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    num_ranks: int = 1
    num_slots: int = 30
    store_blocks: int = 0
    store: Mapping[str, str] = field(default_factory=dict)
    num_layer_ranges: int = 1
    options: Mapping[str, Any] = field(default_factory=lambda: {"cost": {"mode": "always"}})


class FakeEngine:
    """Scheduler, connector and ranks; nothing moves but by `step`.

    Args:
        rng: decides how fast copies are, which drafts are right, and what the driver draws.
    """

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.clock = FakeClock()
        engine = setup.engine
        layout = token_layout(engine.num_blocks, engine.block_size, setup.num_layer_ranges)
        slot_nbytes = slot_nbytes_for(layout.groups)
        self.config = parse_mapping(self._config(slot_nbytes))
        self.connector = SchedulerConnector(self.config, self._shape(), self.clock)
        self.workers = [
            FakeWorker(Rank(i), layout, setup.num_slots, self._stores, self._choose, self.clock)
            for i in range(setup.num_ranks)
        ]
        self.connector.connect([worker.connector.hello for worker in self.workers])
        self.adapter = NeutralConnector(self.connector)
        self.scheduler = FakeScheduler(engine, self.adapter, self._run)
        self.adapter.pool = self.scheduler.pool
        self.runner = FakeRunner(self.workers, self.scheduler.requests, self._choose)
        self.num_added = 0
        self._expected: dict[BlockKey, UInt64s] = {}

    def _config(self, slot_nbytes: int) -> dict[str, Any]:
        setup, num_ranks = self.setup, self.setup.num_ranks
        tiers: list[dict[str, Any]] = [
            {"kind": "dram", "capacity": f"{num_ranks * setup.num_slots * slot_nbytes}B"}
        ]
        if setup.store_blocks:
            capacity = f"{num_ranks * setup.store_blocks * slot_nbytes}B"
            tiers.append({"kind": "memory", "capacity": capacity, **setup.store})
        return {"tiers": tiers, **setup.options}

    def _shape(self) -> EngineShape:
        engine = self.setup.engine
        return EngineShape(
            block_size=engine.block_size,
            windows=(None,) * self.setup.num_layer_ranges,
            num_ranks=self.setup.num_ranks,
            model=None,
            max_tokens_per_step=engine.max_step_tokens,
            seed_speed=PrefillSpeed(0.005, 1e9),
            loads_in_step=engine.execution is Execution.SYNC,
            num_layer_ranges=self.setup.num_layer_ranges,
        )

    def _stores(self, slab: Slab, rank: Rank) -> RankStores:
        return RankStores(self.config, slab, "0", rank.tensor, self.setup.num_ranks)

    def _run(self, step: Any) -> Any:
        return self.runner(step)

    def _choose(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def add(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> FakeRequest:
        """Queue a request and return it."""
        self.num_added += 1
        size = self.setup.engine.block_size
        request = FakeRequest(f"r{self.num_added}", list(prompt), max_tokens, size, **more)
        hashes = prefix_hash_chain(request.oracle.tokens, size)
        for group, layers in enumerate(layer_ranges(NUM_LAYERS, self.setup.num_layer_ranges)):
            for i, key in enumerate(block_keys(hashes, group)):
                kv = request.oracle.kv[layers.start : layers.stop]
                self._expected[key] = kv[:, i * size : (i + 1) * size]
        self.scheduler.add(request)
        return request

    def step(self, abort: Sequence[str] = ()) -> None:
        """Run one step and check the books."""
        self.clock.advance(0.001)
        self.scheduler.step(abort)
        check_controller(self.connector.controller)
        self._check_frames()

    def _check_frames(self) -> None:
        """Assert that every block that DRAM serves holds what its key says, on every rank."""
        for entry in self.connector.controller.dram.entries():
            if entry.residence is Residence.READY:
                for worker in self.workers:
                    found = worker.frame(entry.slot, group_of(entry.key)) ^ worker.salt
                    assert np.array_equal(found, self._expected[entry.key]), "a false frame"

    def drain(self) -> int:
        """Step until every request has ended and every rank has answered; returns the steps."""
        for num in range(MAX_DRAIN_STEPS):
            if not self.scheduler.requests and not self.connector.busy:
                return num
            self.step()
        raise AssertionError(f"no progress: {list(self.scheduler.requests.values())}")

    def generate(self, prompt: Sequence[int], max_tokens: int = 3) -> FakeRequest:
        """Run one request to its end, and all that follows from it."""
        request = self.add(prompt, max_tokens)
        self.drain()
        return request

    def end(self) -> None:
        """Let everything end, and assert that it returns to its start."""
        self.drain()
        self.step()
        self.drain()  # a step may have begun to demote
        pool = self.scheduler.pool
        assert pool.num_free == pool.num_blocks, "blocks were leaked"
        check_quiet(self.connector.controller)
        assert self.scheduler.reset(preempt=False)
        self.step()
        self.drain()
        check_empty(self.connector.controller)
        for worker in self.workers:
            worker.close()
        self.connector.close()


def prompt_of(document: int, num_tokens: int) -> list[int]:
    """Return the first tokens of a document; documents share their first nine tokens."""
    rng = random.Random(document)
    rest = [rng.randrange(NUM_TOKEN_IDS) for _ in range(max(0, num_tokens - 9))]
    return ([7] * 9 + rest)[:num_tokens]


def random_work(setup: Setup, seed: int, num_events: int, *, faults: bool = True) -> FakeEngine:
    """Give an engine random requests, aborts, resets and faults; its own checks do the rest."""
    rng = random.Random(seed)
    engine = FakeEngine(setup, rng)
    largest = (setup.engine.num_blocks - 1) * setup.engine.block_size - 8
    for _ in range(num_events):
        match rng.randrange(14):
            case 0 | 1 | 2:
                num_tokens = rng.randint(1, min(largest, 44))
                engine.add(prompt_of(rng.randrange(6), num_tokens), rng.randint(1, 8))
            case 3 if engine.scheduler.requests:
                engine.step(abort=[rng.choice(list(engine.scheduler.requests))])
            case 4 if faults:
                _spoil(engine, rng)
            case 5 if rng.randrange(4) == 0:
                engine.scheduler.reset(preempt=rng.random() < 0.5)
            case 6 if faults:
                engine.clock.advance(rng.choice((0.1, 20.0)))
            case _:
                engine.step()
    engine.end()
    return engine


def _spoil(engine: FakeEngine, rng: random.Random) -> None:
    worker = rng.choice(engine.workers)
    if rng.random() < 0.2:
        worker.device.fail_copy(RuntimeError("a copy failed"))
    worker.device.num_refused[Direction.SCATTER] = rng.randrange(2)
    for store in worker.stores.values():
        keys = store.keys()
        if keys:
            store.delete([rng.choice(keys)])
