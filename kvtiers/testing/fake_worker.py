"""Ranks of a fake engine: KV in memory, a copying plane over it, forward passes that check."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from kvtiers.connector.stores import RankStores
from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.executor import Executor
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.key_space import KeySpace
from kvtiers.data.slab import Slab
from kvtiers.data.workshop import Workshop
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.keys import Rank
from kvtiers.model.layer_ranges import layer_ranges
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView
from kvtiers.model.messages import (
    Completion,
    Hello,
    JobId,
    Link,
    StepOrders,
    WorkerReport,
)
from kvtiers.testing.fake_device import FakeDevice
from kvtiers.testing.fake_request import NUM_LAYERS, FakeRequest, UInt64s
from kvtiers.testing.fake_step import FakeStep, StepResult

ITEMSIZE = 8
MAX_TURNS = 10_000
POISON = np.uint64(0xDEADBEEF)

Choose = Callable[[Sequence[Any]], Any]
MakeStores = Callable[[Slab, Rank], RankStores]


def token_layout(num_blocks: int, block_size: int, num_ranges: int = 1) -> KVLayout:
    """Return a layout with one 8-byte number per token and layer.

    Args:
        num_ranges: KV groups that the layers make.
    """
    nbytes = num_blocks * block_size * ITEMSIZE
    views = [
        TensorView(
            f"layer{i}",
            i,
            0,
            (Axis.BLOCK, Axis.TOKEN),
            (num_blocks, block_size),
            (block_size * ITEMSIZE, ITEMSIZE),
            ITEMSIZE,
        )
        for i in range(NUM_LAYERS)
    ]
    groups = tuple(
        GroupLayout.from_views(
            [views[layer] for layer in layers],
            group=idx,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="uint64",
        )
        for idx, layers in enumerate(layer_ranges(NUM_LAYERS, num_ranges))
    )
    return KVLayout((nbytes,) * NUM_LAYERS, groups)


class SpoiltDevice(FakeDevice):
    """A device that refuses the next copies of one direction when told to.

    Attributes:
        num_refused: by direction, submissions still to be refused.
    """

    def __init__(self, layout: KVLayout, slab: Slab) -> None:
        super().__init__(layout, slab)
        self.num_refused: Counter[Direction] = Counter()

    def submit(self, direction: Direction, batch: CopyBatch, after: Marker | None) -> Ticket:
        """Queue a batch, or refuse it."""
        if self.num_refused[direction] > 0:
            self.num_refused[direction] -= 1
            raise RuntimeError("the device refuses")
        return super().submit(direction, batch, after)


class SteppedExecutor:
    """Stands in for `ExecutorThread` without a thread: it moves when somebody waits, or drifts."""

    def __init__(self, executor: Executor, device: FakeDevice, choose: Choose) -> None:
        self._executor = executor
        self._device = device
        self._choose = choose
        self.num_polls = 0
        self.submit = executor.submit
        self.forget = executor.forget
        self.enter = executor.enter
        self.need = executor.need
        self.take_links: Callable[[], tuple[Link, ...]] = executor.take_links

    def drift(self) -> None:
        """Let some copies happen, or none."""
        for _ in range(self._choose((0, 0, 1, 3, 30))):
            self._turn()

    def poll(self) -> list[Completion]:
        """Return the answers since the last call."""
        self.num_polls += 1
        return self._executor.poll()

    def wait_read(self, fences: Mapping[JobId, Iterable[int]], seconds: float) -> bool:  # noqa: ARG002
        """Read what is fenced; now and then time runs out before it has begun."""
        fence = self._executor.fence(fences)
        if self._choose(range(20)) == 0:
            self._executor.give_up(fence.jobs)
            self._until(lambda: not fence.jobs)
            return False
        self._until(lambda: not fence.jobs)
        return True

    def wait_loaded(self, job_ids: Iterable[JobId], seconds: float | None) -> bool:
        """Load; without a limit until it is done."""
        wanted = set(job_ids)
        if seconds is not None:
            self.drift()
        else:
            self._until(lambda: not self._executor.unloaded(wanted))
        return not self._executor.unloaded(wanted)

    def wait_loaded_groups(self, job_ids: Iterable[JobId], group: int) -> bool:
        """Load the blocks of KV groups up to one, and not a turn more."""
        wanted = set(job_ids)
        self._until(lambda: not self._executor.lacks(wanted, group))
        return True

    def wait_idle(self, seconds: float) -> bool:  # noqa: ARG002
        """Drift."""
        self.drift()
        return self._executor.idle

    def close(self) -> None:
        """Release everything."""
        self._executor.close()

    def _turn(self) -> None:
        self._executor.advance()
        self._device.step()

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(MAX_TURNS):
            if done():
                return
            self._turn()
        raise AssertionError("a wait that never ends")


class FakeWorker:
    """One rank."""

    def __init__(
        self,
        rank: Rank,
        layout: KVLayout,
        num_slots: int,
        make_stores: MakeStores,
        choose: Choose,
        clock: Callable[[], float],
    ) -> None:
        slab = self.slab = Slab(num_slots, slot_nbytes_for(layout.groups), pin="off")
        self.device = SpoiltDevice(layout, slab)
        found = make_stores(slab, rank)
        self.stores = found.stores
        key_space = KeySpace(bytes(32), rank)
        shop = Workshop(slab, self.device, layout, key_space, self.stores, rank, clock)
        self.executor = SteppedExecutor(Executor(shop), self.device, choose)
        self.num_ranges = len(layout.groups)
        self.salt = np.uint64(rank.tensor * 0x9E3779B97F4A7C15 % 2**64)
        payload = tuple(group.payload_nbytes for group in layout.groups)
        hello = Hello(
            rank, bytes(32), num_slots, slab.slot_nbytes, payload, pinned=False, stores=found.hellos
        )
        mark: Callable[[], Marker | None] = self.device.mark
        self.connector = WorkerConnector(hello, cast(ExecutorThread, self.executor), mark)

    def kv(self, layer: int) -> UInt64s:
        """Return one layer's KV, [blocks, tokens], to be read and written."""
        group = self.device.layout.groups[0]
        return self.device.memory[layer].view(np.uint64).reshape(group.num_blocks, group.block_size)

    def frame(self, slot: int, group_idx: int = 0) -> UInt64s:
        """Return the KV in one slot, [layers of the group, tokens]."""
        group = self.device.layout.groups[group_idx]
        start = FrameFormat.of(group).header_nbytes
        payload = self.slab.view(slot)[start : start + group.payload_nbytes]
        return np.frombuffer(payload, np.uint64).reshape(-1, group.block_size)

    def close(self) -> None:
        """Release everything."""
        self.connector.close()


class FakeRunner:
    """Runs steps on all ranks: orders first, then a forward pass that reads every KV it uses.

    A request whose KV is wrong anywhere samples the token -1, and what it computes is poison.

    Args:
        requests: the scheduler's, by id: what each is made of. choose: how many drafts hit.
    """

    def __init__(
        self, workers: Sequence[FakeWorker], requests: Mapping[str, FakeRequest], choose: Choose
    ) -> None:
        self.workers = workers
        self.num_hooks: Counter[str] = Counter()
        self._requests = requests
        self._choose = choose
        self._computed: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._received: Counter[str] = Counter()

    def __call__(self, step: FakeStep) -> StepResult:
        """Run one step, hooks and all, in vLLM's order."""
        orders: StepOrders = step.kv_connector_metadata
        for worker in self.workers:
            worker.executor.drift()
            worker.connector.begin_step(orders)
            if step.has_sync_kv_loads and worker.num_ranges == 1:
                worker.connector.load_in_step()
        tokens = self._forward(step)
        for worker in self.workers:
            if not step.has_sync_kv_loads:
                worker.connector.load_in_step()
            worker.connector.end_step()
            worker.executor.drift()
        return StepResult(tokens, self._collect())

    def _collect(self) -> Any:
        reports = []
        invalid: set[int] = set()
        finished: set[str] = set()
        for worker in self.workers:
            loaded = worker.connector.take_loaded()
            invalid |= loaded.failed_blocks
            for request_id in loaded.request_ids:
                self._received[request_id] += 1
                if self._received[request_id] == len(self.workers):
                    del self._received[request_id]
                    finished.add(request_id)
            report = worker.connector.take_report()
            if report is not None:
                reports.append(report)
        merged = functools.reduce(WorkerReport.merged, reports) if reports else None
        return SimpleNamespace(
            invalid_block_ids=invalid, finished_recving=finished, kv_connector_worker_meta=merged
        )

    def _forward(self, step: FakeStep) -> dict[str, list[int]]:
        for data in step.scheduled_new_reqs:
            self._computed[data.req_id] = data.num_computed_tokens
            self._known[data.req_id] = self._requests[data.req_id].num_tokens
        cached = step.scheduled_cached_reqs
        for request_id, num in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            # What the scheduler counts is an upper bound: drafts may have been rejected since.
            self._computed[request_id] = min(self._computed[request_id], num)
            request = self._requests[request_id]
            if request.num_in_flight_tokens == step.num_scheduled_tokens[request_id]:
                self._known[request_id] = request.num_tokens  # no output of it is on its way
        return {
            request_id: self._run(self._requests[request_id], num, step.block_ids[request_id])
            for request_id, num in step.num_scheduled_tokens.items()
        }

    def _run(self, request: FakeRequest, num: int, block_ids: list[int]) -> list[int]:
        start, known = self._computed[request.request_id], self._known[request.request_id]
        end = start + num
        right = all(self._reads(worker, request, start, block_ids) for worker in self.workers)
        if end < known:
            self._write(request, start, end, end, block_ids, right)
            self._computed[request.request_id] = end
            return []
        num_hits = self._choose(range(end - known + 1))
        true_end = known + num_hits
        self._write(request, start, true_end, end, block_ids, right)
        self._computed[request.request_id] = true_end
        self._known[request.request_id] = true_end + 1
        sampled = request.oracle.tokens[known : true_end + 1]
        return sampled if right else [-1] * len(sampled)

    def _reads(
        self, worker: FakeWorker, request: FakeRequest, end: int, block_ids: list[int]
    ) -> bool:
        """Whether all KV that attention reads is the request's own."""
        for layer in range(NUM_LAYERS):
            if worker.num_ranges > 1:
                worker.connector.load_in_step(layer * worker.num_ranges // NUM_LAYERS)
            rows = worker.kv(layer)[block_ids].reshape(-1)[:end]
            if not np.array_equal(rows ^ worker.salt, request.oracle.kv[layer, :end]):
                return False
        return True

    def _write(
        self,
        request: FakeRequest,
        start: int,
        true_end: int,
        end: int,
        block_ids: list[int],
        right: bool,
    ) -> None:
        for worker in self.workers:
            for layer in range(NUM_LAYERS):
                kv = worker.kv(layer)
                size = kv.shape[1]
                for position in range(start, end):
                    true = right and position < true_end
                    value = request.oracle.kv[layer, position] ^ worker.salt if true else POISON
                    kv[block_ids[position // size], position % size] = value
