"""The engine-neutral connector behind the method names of a vLLM V1 connector."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.step import Reload, Step
from kvtiers.model.messages import StepOrders
from kvtiers.testing.fake_pool import FakePool


class NeutralConnector:
    """The scheduler's side, for an engine with one table of blocks: what an adapter does, and no
    more.

    Attributes:
        pool: the engine's blocks, bound after construction.
    """

    def __init__(self, connector: SchedulerConnector) -> None:
        self.connector = connector
        self.pool: FakePool | None = None
        self._num_ranges = connector.shape.num_layer_ranges
        self._offered: dict[str, tuple[Reload, int]] = {}
        self._loading: list[set[int]] = []
        self._steps: deque[bool] = deque()  # of those that run, whether they have tokens

    def on_new_request(self, request: Any) -> None:
        """Note a new request."""
        self.connector.arrived(request.request_id, request.block_hashes)
        if self.pool is not None and not request.skip_reading_prefix_cache:
            hits = self.pool.hit(request.block_hashes, len(request.block_hashes))
            num_local = len(hits) * self.connector.shape.block_size
            self.connector.prefetch(request.request_id, request.num_tokens, num_local)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer a lookup."""
        if request.skip_reading_prefix_cache:
            return 0, False
        reload = self.connector.reloadable(
            request.request_id, request.block_hashes, request.num_tokens, num_computed_tokens
        )
        self._offered[request.request_id] = reload, num_computed_tokens
        return reload.num_tokens, reload.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start a load; a repeated call changes nothing."""
        offered = self._offered.pop(request.request_id, None)
        if offered is None:
            return
        reload, num_local = offered
        tables = [[block.block_id for block in group] for group in blocks.blocks]
        block_ids = tables * self._num_ranges
        if num_external_tokens and not reload.asynchronous:
            first = num_local // self.connector.shape.block_size
            self._loading.append(set(block_ids[0][first:]))
        taken = Reload(num_external_tokens, reload.asynchronous)
        self.connector.allocated(request.request_id, block_ids, num_local, taken)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Return the orders of a step."""
        output = scheduler_output
        before = {d.req_id: d.num_computed_tokens for d in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        scheduled = output.num_scheduled_tokens
        resolve = output.kv_connector_block_state.resolve_block_ids
        self._steps.append(bool(scheduled))
        return self.connector.schedule(
            Step(
                num_computed_tokens={i: before[i] + num for i, num in scheduled.items()},
                overwritten=self._new_blocks(output),
                preempted=output.preempted_req_ids,
                block_ids=lambda request_id: list(resolve(request_id)) * self._num_ranges,
                num_scheduled_tokens=output.total_num_scheduled_tokens,
            )
        )

    def _new_blocks(self, output: Any) -> Iterator[int]:
        for data in output.scheduled_new_reqs:
            done = data.num_computed_tokens // self.connector.shape.block_size
            yield from data.block_ids[0][done:]
        for block_ids in output.scheduled_cached_reqs.new_block_ids:
            yield from block_ids[0] if block_ids else ()

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the ranks' answers; take what did not come out of the prefix cache."""
        if connector_output.kv_connector_worker_meta is not None:
            self.connector.reported(connector_output.kv_connector_worker_meta)
        if self._steps.popleft():
            self.connector.step_ended()
        invalid = connector_output.invalid_block_ids
        loading, self._loading = self._loading, []
        for block_ids in loading:
            if block_ids & invalid and self.pool is not None:
                self.pool.evict(block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Note the end of a request."""
        self._offered.pop(request.request_id, None)
        self.connector.finished(request.request_id, list(block_ids) * self._num_ranges)
        return False, None

    def reset_cache(self) -> bool:
        """Serve nothing that was stored before."""
        self.connector.reset()
        return True
