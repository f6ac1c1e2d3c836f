"""What the benchmarks of the deciding plane run on: a full index, and an engine that decodes."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

import numpy as np

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.step import Step
from kvtiers.cost.prefill import PrefillSpeed
from kvtiers.model.config import parse_mapping
from kvtiers.model.keys import Rank, block_keys
from kvtiers.model.messages import DRAM, Completion, Hello, StepOrders, WorkerReport
from kvtiers.model.outcome import Outcome

BLOCK_SIZE = 32
SLOT_NBYTES = 2**20
PROMPT_BLOCKS = 8192
RANK = Rank()


def hashes_of(document: int, num_blocks: int, start: int = 0) -> list[bytes]:
    """Return block hashes of a document; as random as the engine's, cheaper to make."""
    prefix = document.to_bytes(8, "big")
    numbers = range(start, start + num_blocks)
    return [
        hashlib.blake2b(prefix + i.to_bytes(8, "big"), digest_size=32).digest() for i in numbers
    ]


def connect(num_slots: int) -> SchedulerConnector:
    """Return a scheduler's side whose one rank has a slab of `num_slots` slots."""
    capacity = f"{num_slots}MiB"
    config = parse_mapping({"tiers": [{"kind": "dram", "capacity": capacity}]})
    shape = EngineShape(BLOCK_SIZE, (None,), 1, None, 8192, PrefillSpeed(0.005, 1e14))
    connector = SchedulerConnector(config, shape)
    connector.connect([Hello(RANK, bytes(32), num_slots, SLOT_NBYTES, (SLOT_NBYTES,), False)])
    return connector


def fill_index(connector: SchedulerConnector, num_blocks: int) -> None:
    """Put documents of `PROMPT_BLOCKS` blocks into DRAM, numbered from 0."""
    tier = connector.controller.dram
    for document in range(num_blocks // PROMPT_BLOCKS):
        parent = None
        entries = []
        for key in block_keys(hashes_of(document, PROMPT_BLOCKS), 0):
            entry = tier.reserve(key, parent)
            assert entry is not None
            entries.append(entry)
            parent = key
        for entry in entries:
            tier.commit(entry)


@dataclass
class DecodingEngine:
    """Requests that all decode, one token a step each, over a context of `num_blocks` blocks, which
    may become `num_more` more."""

    connector: SchedulerConnector
    num_requests: int
    num_blocks: int
    num_more: int = 64
    hashes: list[list[bytes]] = field(init=False)
    block_ids: list[list[int]] = field(init=False)
    computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        requests = range(self.num_requests)
        self.hashes = [hashes_of(10_000 + i, self.num_blocks) for i in requests]
        ids = itertools.count(1)
        self.block_ids = [
            [next(ids) for _ in range(self.num_blocks + self.num_more)] for _ in requests
        ]
        self.computed = [self.num_blocks * BLOCK_SIZE for _ in requests]
        for i in requests:
            self.connector.arrived(str(i), self.hashes[i])
        self.answer(self.connector.schedule(self.step()))

    def step(self) -> Step:
        """Return what the engine is about to run, with the counts as they are."""
        return Step(
            num_computed_tokens={str(i): n for i, n in enumerate(self.computed)},
            overwritten=(),
            preempted=(),
            block_ids=lambda request_id: (self.block_ids[int(request_id)],),
            num_scheduled_tokens=self.num_requests,
        )

    def advance(self, num_completing: int, first: int = 0) -> Step:
        """Let some requests, from the first one on, complete a block in the coming step, and the
        rest one token."""
        for i in range(self.num_requests):
            if (i - first) % self.num_requests < num_completing:
                done = len(self.hashes[i])
                self.hashes[i] += hashes_of(10_000 + i, 1, start=done)
                self.computed[i] = (done + 1) * BLOCK_SIZE
            else:
                full = len(self.hashes[i]) * BLOCK_SIZE
                self.computed[i] = full + (self.computed[i] + 1) % BLOCK_SIZE
        return self.step()

    def answer(self, orders: StepOrders) -> WorkerReport:
        """Return and deliver what the rank says once all is copied."""
        completions = [
            Completion(
                transfer.job_id,
                orders.epoch,
                RANK,
                DRAM,
                np.full(transfer.num_blocks, Outcome.OK, np.uint8),
                last=True,
            )
            for transfer in orders.after
        ]
        report = WorkerReport(tuple(completions))
        self.connector.reported(report)
        return report
