"""vLLM's scheduler hooks in terms of the engine-neutral connector."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.step import Reload, Step
from kvtiers.engines.vllm.async_loads import AsyncLoads
from kvtiers.engines.vllm.identity import engine_shape
from kvtiers.engines.vllm.metadata import KVTiersHandshake, KVTiersMetadata, KVTiersWorkerMetadata
from kvtiers.engines.vllm.metrics import KVTiersStats
from kvtiers.model.config import Config
from kvtiers.model.messages import NO_BLOCK

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    """A step under way, for measuring the engine's speed."""

    started: float
    num_new: list[int]
    num_context: list[int]
    pure: bool  # it loaded nothing: all its time is the engine's own


class SchedulerSide:
    """One per engine core."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any) -> None:
        self._shape = engine_shape(vllm_config, kv_cache_config, config.reload.layer_ranges)
        self.connector = SchedulerConnector(config, self._shape)
        self._offered: dict[str, tuple[Reload, int]] = {}
        self._loading_in_step: dict[str, set[int]] = {}
        self._async_loads = AsyncLoads()
        self._running: deque[_Running] = deque()
        self._last_output = 0.0
        self.kv_cache_manager: Any = None

    def connect(self, handshakes: dict[tuple[int, int], KVTiersHandshake]) -> None:
        """Take in the hellos of all ranks."""
        self.connector.connect([handshakes[place].hello for place in sorted(handshakes)])

    # -- requests ---------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Note a new request."""
        self.connector.arrived(request.request_id, request.block_hashes)
        if not request.skip_reading_prefix_cache:
            num_local = self._num_cached_blocks(request) * self._shape.block_size
            self.connector.prefetch(request.request_id, request.num_tokens, num_local)

    def num_matched(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Answer `get_num_new_matched_tokens`."""
        if request.skip_reading_prefix_cache:
            return 0, False
        reload = self.connector.reloadable(
            request.request_id, request.block_hashes, request.num_tokens, num_local_tokens
        )
        self._offered[request.request_id] = (reload, num_local_tokens)
        return reload.num_tokens, reload.asynchronous

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handle `update_state_after_alloc`; a repeated call changes nothing."""
        block_ids = [
            [NO_BLOCK if block.is_null else block.block_id for block in group]
            for group in blocks.blocks
        ] * self._shape.num_layer_ranges
        offered = self._offered.pop(request.request_id, None)
        if offered is None:  # another connector's load, or the second call of an asynchronous one
            self.connector.will_fill(block_ids)
            return
        reload, num_local_tokens = offered
        taken = Reload(num_external_tokens, reload.asynchronous)
        if num_external_tokens:
            first = num_local_tokens // self._shape.block_size
            filled = {b for group in block_ids for b in group[first:] if b != NO_BLOCK}
            if reload.asynchronous:
                self._async_loads.begun(request.request_id, filled)
            else:
                self._loading_in_step[request.request_id] = filled
        self.connector.allocated(request.request_id, block_ids, num_local_tokens, taken)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        """Handle the end of a request, before its blocks are freed."""
        self._offered.pop(request.request_id, None)
        null = self._null_block_id()
        groups = [[NO_BLOCK if b == null else b for b in group] for group in block_ids]
        self.connector.finished(request.request_id, groups * self._shape.num_layer_ranges)

    # -- steps ------------------------------------------------------------------------

    def build_meta(self, output: Any) -> KVTiersMetadata:
        """Handle `build_connector_meta`."""
        before = _computed_before(output)
        computed = {
            request_id: before[request_id] + num
            for request_id, num in output.num_scheduled_tokens.items()
        }
        resolve = output.kv_connector_block_state.resolve_block_ids
        null = self._null_block_id()

        def block_ids(request_id: str) -> list[list[int]]:
            groups = [[NO_BLOCK if b == null else b for b in g] for g in resolve(request_id)]
            return groups * self._shape.num_layer_ranges

        orders = self.connector.schedule(
            Step(
                num_computed_tokens=computed,
                overwritten=_new_blocks(output, self._shape.block_size),
                preempted=output.preempted_req_ids or (),
                block_ids=block_ids,
                num_scheduled_tokens=output.total_num_scheduled_tokens,
            )
        )
        num_new = list(output.num_scheduled_tokens.values())
        num_context = [before[request_id] for request_id in output.num_scheduled_tokens]
        pure = not orders.sync_loads and not orders.fences
        if num_new:  # vLLM may not tell of the end of a step without tokens
            self._running.append(_Running(time.monotonic(), num_new, num_context, pure))
        return KVTiersMetadata(orders)

    def output(self, output: Any) -> None:
        """Handle `update_connector_output`."""
        ended = self._measure()
        meta = output.kv_connector_worker_meta
        loads = []
        if isinstance(meta, KVTiersWorkerMetadata):
            loads = self.connector.reported(meta.report)
        self._async_loads.told(loads)
        if ended:
            self.connector.step_ended()
        if output.invalid_block_ids and not self._async_loads.explain(output.invalid_block_ids):
            self.connector.distrust()
        self._evict_failed(output.invalid_block_ids or set())

    def stats(self) -> KVTiersStats | None:
        """Return what was counted since the last call, None when nothing was."""
        snapshot = self.connector.drain_counters()
        return None if snapshot.empty else KVTiersStats(snapshot.to_plain())

    # -- internals --------------------------------------------------------------------

    def _measure(self) -> bool:
        """Learn from the step whose output has come, if it had tokens: steps end in the order
        they began."""
        if not self._running:
            return False
        step = self._running.popleft()
        now = time.monotonic()
        seconds = now - max(step.started, self._last_output)
        self._last_output = now
        if step.pure:
            self.connector.step_took(step.num_new, step.num_context, seconds)
        return True

    def _evict_failed(self, invalid: set[int]) -> None:
        """Take what a failed load in a step left out of vLLM's prefix cache.

        vLLM hashed the blocks at once and, under "recompute", leaves them there: an abort
        would let another request hit them. All blocks of such a request from its load on go.
        """
        loading, self._loading_in_step = self._loading_in_step, {}
        if not invalid or self.kv_cache_manager is None:
            return
        for block_ids in loading.values():
            if block_ids & invalid:
                self.kv_cache_manager.evict_blocks(block_ids)

    def _num_cached_blocks(self, request: Any) -> int:
        """Return how many leading blocks of a request vLLM's prefix cache has; 0 if it is unknown.

        `get_computed_blocks` would count the request in vLLM's own statistics.
        """
        num_groups = len(self._shape.windows) // self._shape.num_layer_ranges
        groups = [i for i, window in enumerate(self._shape.windows[:num_groups]) if window is None]
        if self.kv_cache_manager is None or not groups or self._shape.hashes_per_block != 1:
            return 0
        cached = self.kv_cache_manager.block_pool.get_cached_block
        num_blocks = 0
        for block_hash in request.block_hashes:
            if not cached(block_hash, groups):
                break
            num_blocks += 1
        return num_blocks

    def _null_block_id(self) -> int:
        if self.kv_cache_manager is None:
            return 0  # vLLM takes block 0 out of the pool first
        return int(self.kv_cache_manager.block_pool.null_block.block_id)


def _computed_before(output: Any) -> dict[str, int]:
    """Return the tokens computed before this step, of every request in it."""
    before = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return before


def _new_blocks(output: Any, block_size: int) -> Iterator[int]:
    """Yield the engine blocks that requests in this step were newly given."""
    for data in output.scheduled_new_reqs:
        yield from _beyond(data.block_ids, data.num_computed_tokens // block_size)
    cached = output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, block_ids, num_computed in rows:
        if block_ids is not None:
            resumed = request_id in cached.resumed_req_ids
            yield from _beyond(block_ids, num_computed // block_size if resumed else 0)


def _beyond(groups: Iterable[list[int]], first: int) -> Iterator[int]:
    for group in groups:
        yield from group[first:]
