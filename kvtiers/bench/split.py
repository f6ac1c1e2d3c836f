"""Loads that come layer range by layer range, inside the step that computes the rest.

The data plane runs a reload per KV group. An engine that makes a group of each range of layers
can therefore wait for one range at a time; control, which plans whole blocks, is left out here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.connector.worker import WorkerConnector
from kvtiers.engines.reference.model import Chunk
from kvtiers.engines.reference.paged_kv import layer_ranges
from kvtiers.engines.reference.runner import ReferenceRunner
from kvtiers.model.errors import ProtocolError
from kvtiers.model.keys import block_keys, pack_keys, prefix_hash_chain
from kvtiers.model.messages import (
    NO_SLOT,
    JobId,
    StepOrders,
    Transfer,
    TransferKind,
    int64s,
)

_DEADLINE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Split:
    """A prompt, and how many of its leading blocks are loaded; the rest is computed."""

    num_tokens: int
    num_blocks: int


def measure_split(
    runner: ReferenceRunner, prompt: Sequence[int], split: Split, store: str
) -> tuple[float, int]:
    """Load the first blocks of a prompt from a store, and compute the rest at the same time.

    Args:
        runner: idle, with a KV group per layer range and one store, which holds the prompt.

    Returns:
        seconds to the first token, and that token.

    Raises:
        ProtocolError: a block did not come, or the runner has no tiers.
    """
    worker = runner.worker
    if worker is None or runner.scheduler is None:
        raise ProtocolError("a split needs an engine with tiers")
    size, budget = runner.settings.block_size, runner.settings.max_tokens_per_step
    num_blocks = -(-len(prompt) // size)
    # Last block first: each runs over the same memory in another order than it was filled in.
    block_ids = list(range(num_blocks - 1, -1, -1))
    ranges = layer_ranges(runner.model.shape.num_layers, runner.settings.num_groups)
    orders = _orders(runner, prompt, block_ids[: split.num_blocks], store)
    began = time.perf_counter()
    worker.begin_step(orders)
    job_before = {
        layers.start: transfer.job_id
        for layers, transfer in zip(ranges, orders.before, strict=False)
    }

    def before_layer(layer: int) -> None:
        if layer in job_before:
            worker.wait_loaded([job_before.pop(layer)])

    start, token = split.num_blocks * size, -1
    while start < len(prompt):
        end = min(len(prompt), start + budget)
        chunk = Chunk(prompt[start:end], start, block_ids)
        token = int(runner.model.forward([chunk], runner.kv, before_layer)[0].argmax())
        start = end
    seconds = time.perf_counter() - began
    _finish(worker)
    return seconds, token


def _orders(
    runner: ReferenceRunner, prompt: Sequence[int], block_ids: Sequence[int], store: str
) -> StepOrders:
    """Return a reload per layer range, the first layers' first."""
    assert runner.worker is not None
    assert runner.scheduler is not None
    hashes = prefix_hash_chain(prompt, runner.settings.block_size)[: len(block_ids)]
    num_groups, num_slots = runner.settings.num_groups, runner.worker.hello.num_slots
    num = len(hashes)
    epoch = runner.scheduler.controller.epoch
    transfers = [
        Transfer(
            job_id=JobId(-1 - group),
            epoch=epoch,
            kind=TransferKind.RELOAD,
            keys=pack_keys(block_keys(hashes, group)),
            block_ids=int64s(block_ids),
            slots=np.full(num, NO_SLOT, np.int64),
            sources=np.ones(num, np.uint8),
            targets=np.zeros(num, np.uint8),
            stores=(store,),
            window=np.arange(group, num_slots, num_groups, dtype=np.int64),
            deadline=_DEADLINE_SECONDS,
        )
        for group in range(num_groups)
    ]
    return StepOrders(
        step=runner.worker.next_step,
        epoch=epoch,
        before=tuple(transfers if num else ()),
        num_scheduled_tokens=len(prompt),
        generation=runner.scheduler.lasting.generation,
    )


def _finish(worker: WorkerConnector) -> None:
    worker.end_step()
    failed = worker.take_loaded().failed_blocks
    worker.take_report()
    if failed:
        raise ProtocolError(f"{len(failed)} blocks of a split were not loaded")
