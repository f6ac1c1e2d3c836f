"""A serving engine's scheduler that calls a vLLM V1 connector in vLLM's order, step by step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace

from kvtiers.testing.fake_pool import FakePool
from kvtiers.testing.fake_request import FakeRequest, Status
from kvtiers.testing.fake_step import (
    EngineSettings,
    Execute,
    Execution,
    FakeStep,
    StepResult,
    V1Scheduler,
)


class FakeScheduler:
    """Admits, chunks, preempts and ends requests as vLLM 0.32 does under "recompute".

    One KV group. Blocks of a step are in the prefix cache as soon as they are allocated, those
    of an asynchronous load only once it is over. Nothing here is random.

    Args:
        connector: the scheduler's side. execute: runs a step on all ranks.
    """

    def __init__(self, settings: EngineSettings, connector: V1Scheduler, execute: Execute) -> None:
        self.settings = settings
        self.connector = connector
        self.pool = FakePool(settings.num_blocks)
        self.requests: dict[str, FakeRequest] = {}
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.num_matched_calls: Counter[str] = Counter()
        self._execute = execute
        self._in_flight: deque[tuple[FakeStep, StepResult]] = deque()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._preempted: set[str] = set()
        self._finished: set[str] = set()

    def add(self, request: FakeRequest) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """End a request wherever it stands; the blocks of a load stay until it is over."""
        request = self.requests[request_id]
        if request.status is Status.FINISHED:
            return
        held = request.status is Status.LOADING and request_id not in self._received
        self._received.discard(request_id)
        self._failed.discard(request_id)
        self._end(request, hold_blocks=held)

    def reset(self, *, preempt: bool) -> bool:
        """Drop the prefix cache and the connector's; returns whether both could be."""
        if preempt:
            while self.running:
                self._preempt(self.running.pop(), drop_output=True)
        done = self.pool.reset_cache()
        return self.connector.reset_cache() is not False and done

    # -- steps ------------------------------------------------------------------------

    def step(self, abort: Sequence[str] = ()) -> None:
        """Schedule and run one step, and take in the outputs that are due.

        Args:
            abort: requests that users give up while the step runs.
        """
        step = self._schedule()
        self._in_flight.append((step, self._execute(step)))
        for request_id in abort:
            if request_id in self.requests:
                self.abort(request_id)
        late = self.settings.execution is Execution.ASYNC and step.total_num_scheduled_tokens > 0
        while len(self._in_flight) > late:
            self._update(*self._in_flight.popleft())

    def _schedule(self) -> FakeStep:
        budget = self.settings.max_step_tokens
        scheduled: dict[str, int] = {}
        grown: dict[str, list[int]] = {}
        for request in list(self.running):
            if request in self.running:
                budget -= self._schedule_running(request, budget, scheduled, grown)
        new: list[FakeRequest] = []
        sync = False
        if not self._preempted:
            sync = self._schedule_waiting(budget, scheduled, new)
        step = self._step(scheduled, grown, new, sync)
        step.kv_connector_metadata = self.connector.build_connector_meta(step)
        step.kv_connector_block_state = None
        for request_id, num in scheduled.items():
            self._advance(step, self.requests[request_id], num)
        self._preempted, self._finished = set(), set()
        return step

    def _schedule_running(
        self,
        request: FakeRequest,
        budget: int,
        scheduled: dict[str, int],
        grown: dict[str, list[int]],
    ) -> int:
        if request.sure_to_end:
            return 0
        num = min(request.num_tokens_wanted, budget)
        if num <= 0:
            return 0
        while not self._grow(request, num, grown):
            victim = self.running.pop()
            scheduled.pop(victim.request_id, None)
            grown.pop(victim.request_id, None)
            self._preempt(victim)
            if victim is request:
                return 0
        scheduled[request.request_id] = num
        return num

    def _grow(self, request: FakeRequest, num: int, grown: dict[str, list[int]]) -> bool:
        size = self.settings.block_size
        num_blocks = -(-(request.num_computed_tokens + num) // size)
        num_new = max(0, num_blocks - len(request.block_ids))
        if num_new > self.pool.num_free:
            return False
        new = self.pool.take(num_new)
        request.block_ids += new
        if new:
            grown[request.request_id] = new
        full = min(request.num_computed_tokens + num, request.num_tokens) // size
        self.pool.cache(request.block_ids, request.block_hashes, full)
        return True

    def _schedule_waiting(
        self, budget: int, scheduled: dict[str, int], new: list[FakeRequest]
    ) -> bool:
        """Admit requests in their order; returns whether any of them loads within the step."""
        sync = False
        for request in sorted(self.waiting, key=lambda r: not r.block_ids):  # holders first
            if budget <= 0 or len(self.running) >= self.settings.max_running:
                break
            if not self._ready(request):
                continue
            admitted = self._admit(request, budget)
            if admitted is None:
                break
            if admitted:
                num, loads = admitted
                sync |= loads
                budget -= num
                scheduled[request.request_id] = num
                new.append(request)
        return sync

    def _ready(self, request: FakeRequest) -> bool:
        """Whether a waiting request may be looked at: no load of it runs."""
        if request.status is not Status.LOADING:
            return request.num_stale_tokens == 0 or request.drop_stale
        if request.request_id not in self._received:
            return False
        self._received.discard(request.request_id)
        full = request.num_computed_tokens // self.settings.block_size
        if request.request_id in self._failed and not request.num_computed_tokens:
            self._release(request)
        else:
            self.pool.cache(request.block_ids, request.block_hashes, full)
        self._failed.discard(request.request_id)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = Status.WAITING
        return True

    def _admit(self, request: FakeRequest, budget: int) -> tuple[int, bool] | tuple[()] | None:
        """Give a request its blocks.

        Returns:
            its tokens in this step and whether it loads within it; () when it is not run now;
            None when there is no room and nobody after it is looked at either.
        """
        hits: list[int] = []
        external, asynchronous = 0, False
        if request.num_computed_tokens == 0:
            size = self.settings.block_size
            hits = self.pool.hit(request.block_hashes, (request.num_tokens - 1) // size)
            answer = self._ask(request, len(hits) * size)
            if answer is None:
                return ()
            external, asynchronous = answer
        computed = max(request.num_computed_tokens, len(hits) * self.settings.block_size) + external
        num = 0 if asynchronous else min(request.num_tokens - computed, budget)
        if not self._allocate(request, hits, computed, num, asynchronous):
            return None
        blocks = SimpleNamespace(
            blocks=([SimpleNamespace(block_id=b, is_null=False) for b in request.block_ids],)
        )
        self.connector.update_state_after_alloc(request, blocks, external)
        request.num_computed_tokens = computed
        if asynchronous:
            request.status = Status.LOADING
            return ()
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        return num, external > 0

    def _ask(self, request: FakeRequest, num_local_tokens: int) -> tuple[int, bool] | None:
        self.num_matched_calls[request.request_id] += 1
        external, asynchronous = self.connector.get_num_new_matched_tokens(
            request, num_local_tokens
        )
        if external is None:
            return None
        assert external >= 0
        assert num_local_tokens + external < request.num_tokens, "nothing is left to compute"
        assert external or not asynchronous
        return external, asynchronous

    def _allocate(
        self, request: FakeRequest, hits: list[int], computed: int, num: int, asynchronous: bool
    ) -> bool:
        size = self.settings.block_size
        num_blocks = -(-(computed + num) // size)
        num_new = max(0, num_blocks - len(hits) - len(request.block_ids))
        # A load holds its blocks without getting on; whoever prefills must be able to end.
        reserved = self._num_reserved() if asynchronous else 0
        whole = -(-(request.num_tokens + 1) // size) - len(request.block_ids)
        fits = self.pool.num_needed(max(num_new, whole - len(hits)), hits) <= self.pool.num_free
        if not fits or self.pool.num_needed(num_new, hits) > self.pool.num_free - reserved:
            return False
        self.pool.touch(hits)
        request.block_ids += hits + self.pool.take(num_new)
        if not asynchronous:
            full = min(computed + num, request.num_tokens) // size
            self.pool.cache(request.block_ids, request.block_hashes, full)
        return True

    def _num_reserved(self) -> int:
        size = self.settings.block_size
        prefilling = [r for r in self.requests.values() if r.status is Status.LOADING]
        prefilling += [r for r in self.running if r.num_computed_tokens < r.num_tokens]
        return sum(max(0, -(-(r.num_tokens + 1) // size) - len(r.block_ids)) for r in prefilling)

    def _step(
        self,
        scheduled: dict[str, int],
        grown: dict[str, list[int]],
        new: list[FakeRequest],
        sync: bool,
    ) -> FakeStep:
        first = [
            SimpleNamespace(
                req_id=r.request_id,
                block_ids=(list(r.block_ids),),
                num_computed_tokens=r.num_computed_tokens,
            )
            for r in new
        ]
        admitted = {r.request_id for r in new}
        on = [self.requests[i] for i in scheduled if i not in admitted]
        new_blocks = [([*grown[r.request_id]],) if r.request_id in grown else None for r in on]
        cached = SimpleNamespace(
            req_ids=[r.request_id for r in on],
            new_block_ids=new_blocks,
            num_computed_tokens=[r.num_computed_tokens for r in on],
            resumed_req_ids=set(),
        )

        def resolve(request_id: str) -> tuple[list[int], ...]:
            assert request_id in scheduled, "only scheduled requests have blocks to resolve"
            return (list(self.requests[request_id].block_ids),)

        return FakeStep(
            scheduled_new_reqs=first,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self._preempted,
            finished_req_ids=self._finished,
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=resolve),
            has_sync_kv_loads=sync,
            block_ids={i: list(self.requests[i].block_ids) for i in scheduled},
        )

    def _advance(self, step: FakeStep, request: FakeRequest, num: int) -> None:
        """Count the tokens of a step as computed; what is rejected is taken back later."""
        request.num_computed_tokens += num
        request.num_in_flight_tokens += num
        num_drafts = request.num_computed_tokens - request.num_tokens - request.num_placeholders
        if num_drafts < 0:
            return  # a chunk of a prompt
        step.num_drafts[request.request_id] = num_drafts
        if self.settings.execution is Execution.ASYNC:
            request.num_placeholders += 1 + num_drafts
        request.num_drafts = self.settings.num_draft_tokens

    def _update(self, step: FakeStep, result: StepResult) -> None:
        failed = self._invalidate(set(result.connector.invalid_block_ids), step)
        for request_id, num in step.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= num
            stale = request.num_stale_tokens > 0
            request.num_stale_tokens -= num if stale else 0
            dropped = stale and request.drop_stale
            if request_id not in failed and not dropped and request.status is not Status.FINISHED:
                self._deliver(request, result.tokens.get(request_id, []), step, stale)
        self.connector.update_connector_output(result.connector)
        for request_id in result.connector.finished_recving or ():
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                self._received.add(request_id)
            else:
                assert request.status is Status.FINISHED
                self._forget(request)

    def _deliver(
        self, request: FakeRequest, tokens: list[int], step: FakeStep, stale: bool
    ) -> None:
        if not tokens:
            return
        assert -1 not in tokens, f"{request.request_id}: computed on KV that is not its own"
        num_rejected = step.num_drafts.get(request.request_id, 0) + 1 - len(tokens)
        if not stale:
            request.num_computed_tokens -= num_rejected
            if self.settings.execution is Execution.ASYNC:
                request.num_placeholders -= num_rejected + len(tokens)
                assert request.num_placeholders >= 0
        request.append(tokens)
        if request.num_output_tokens >= request.max_tokens:
            self._end(request)
        elif not stale:
            size = self.settings.block_size
            known = min(request.num_computed_tokens - request.num_placeholders, request.num_tokens)
            self.pool.cache(request.block_ids, request.block_hashes, known // size)

    def _invalidate(self, invalid: set[int], step: FakeStep) -> set[str]:
        """Take tokens back whose blocks did not come; returns requests whose output is void."""
        if not invalid:
            return set()
        loading = [r for r in self.waiting if r.status is Status.LOADING]
        self._failed |= self._cut(loading, invalid, {})
        return self._cut(self.running, invalid, step.num_scheduled_tokens)

    def _cut(
        self, requests: list[FakeRequest], invalid: set[int], scheduled: dict[str, int]
    ) -> set[str]:
        size = self.settings.block_size
        affected: set[str] = set()
        marked: set[int] = set()
        for request in requests:
            computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            blocks = request.block_ids[: -(-computed // size)]
            bad = [idx for idx, block_id in enumerate(blocks) if block_id in invalid]
            if not bad:
                continue
            affected.add(request.request_id)
            mine = [idx for idx in bad if blocks[idx] not in marked]
            marked.update(blocks[idx] for idx in bad)
            request.num_computed_tokens = mine[0] * size if mine else computed
        return affected

    def _preempt(self, request: FakeRequest, drop_output: bool = False) -> None:
        self._release(request)
        request.status = Status.WAITING
        request.num_computed_tokens = request.num_placeholders = request.num_drafts = 0
        request.drop_stale = drop_output or (request.drop_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)

    def _end(self, request: FakeRequest, hold_blocks: bool = False) -> None:
        num_blocks = -(-request.num_computed_tokens // self.settings.block_size)
        block_ids = request.block_ids[:num_blocks]
        request.status = Status.FINISHED
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]
        delay, _ = self.connector.request_finished_all_groups(request, (block_ids,))
        assert not delay, "this engine knows no deferred frees"
        self._finished.add(request.request_id)
        if not hold_blocks:
            self._forget(request)

    def _forget(self, request: FakeRequest) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: FakeRequest) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
