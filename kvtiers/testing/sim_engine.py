"""An engine of requests and blocks around a controller, driven event by event."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.control.answers import Answer, LoadDone
from kvtiers.control.breaker import MAX_BACKOFF_SECONDS
from kvtiers.control.controller import Controller
from kvtiers.control.match import ABSENT
from kvtiers.control.prefetch import Arrival
from kvtiers.control.presence import Belief
from kvtiers.control.reload import LoadRequest
from kvtiers.control.tier import Residence
from kvtiers.model.keys import BlockKey, Rank, block_key
from kvtiers.model.messages import HBM, NO_BLOCK, Completion, JobId, Lookup
from kvtiers.model.outcome import Outcome
from kvtiers.testing.invariants import check_controller, check_empty, check_quiet, check_stores
from kvtiers.testing.sim_documents import MAX_BLOCKS, NUM_DOCUMENTS, block_hash
from kvtiers.testing.sim_media import Choose, SimMedia
from kvtiers.testing.sim_rank import SimRank
from kvtiers.testing.sim_request import (
    BLOCK_SIZE,
    MAX_REQUESTS,
    NUM_ENGINE_BLOCKS,
    SHARED,
    SimRequest,
)


class SimEngine:
    """Requests that come, load, compute, are preempted and end, while ranks answer as they like.

    What it asserts on the way is what a controller promises. Nothing is random here.

    Args:
        choose: picks one of some possibilities; whoever drives the engine is behind it.
    """

    def __init__(self, controller: Controller, num_ranks: int, choose: Choose) -> None:
        self.settings = controller.settings
        self.controller = controller
        self.choose = choose
        self.media = SimMedia(self.settings, num_ranks)
        self.ranks = [
            SimRank(Rank(i), self.settings.num_slots, stores)
            for i, stores in enumerate(self.media.of_rank)
        ]
        self.requests: list[SimRequest] = []
        self.free = list(range(NUM_ENGINE_BLOCKS))
        self.fills: list[tuple[int, BlockKey]] = []
        self.lookups: list[Lookup] = []
        self.job_of: dict[JobId, SimRequest] = {}
        self.now = 0.0
        self.num_requests = 0

    def happens(self) -> None:
        """Let one thing happen, of those that can; computing is twice as likely as others."""
        can: dict[Callable[[], None], object] = {
            self.arrive: len(self.requests) < MAX_REQUESTS,
            self.ask: self._any("waiting"),
            self.compute: self._any("running"),
            self.leave: self._any("running", "waiting", "loading"),
            self.step: True,
            self.answer: self._answerable(),
            self.answer_all: self._answerable(),
            self.answer_lookups: self.lookups,
            self.drop_shared_frame: self.media.shared.frames,
            self.wait: True,
            self.break_or_mend_store: self.settings.stores,
            self.reset: self.num_requests % 4 == 3,
            self.controller.distrust: self.num_requests % 5 == 2,  # steps that were false
        }
        possible = [thing for thing, may in can.items() if may]
        if can[self.compute]:
            possible.append(self.compute)
        self.choose(possible)()

    def wait(self) -> None:
        """Time goes by."""
        self.now += self.choose((0.01, 1.0, 20.0))

    def arrive(self) -> None:
        """A request comes, and may be looked up at once; documents share their first two blocks."""
        document = self.choose(range(NUM_DOCUMENTS))
        num_blocks = self.choose(range(1, MAX_BLOCKS + 1))
        self.num_requests += 1
        groups = range(len(self.settings.groups))
        hashes = [block_hash(document, i) for i in range(num_blocks)]
        keys = [[block_key(block_hash, group) for block_hash in hashes] for group in groups]
        request = SimRequest(
            f"r{self.num_requests}", keys, [[] for _ in groups], [0 for _ in groups]
        )
        self.requests.append(request)
        arrival = Arrival(
            request.request_id, keys, self.choose((0, 0, 1)), self._num_tokens(request)
        )
        self.controller.arrived(keys, self.now)
        self.controller.prefetch(arrival)
        if self.choose((False, True)):
            self._ask(request, fresh=True)

    def ask(self) -> None:
        """The engine looks a request up, and may admit it."""
        self._ask(self._pick("waiting"))

    def _ask(self, request: SimRequest, fresh: bool = False) -> None:
        answer = self._plan(request)
        self._check_answer(request, answer)
        if answer.num_blocks is not None and self.choose((False, True)):
            self._admit(request, answer.num_blocks, fresh)

    def _plan(self, request: SimRequest) -> Answer:
        args = request.request_id, request.keys, 0, self._num_tokens(request), self.now
        answer = self.controller.plan(*args)
        again = self.controller.plan(*args)
        assert again.num_blocks == answer.num_blocks, "the answer flipped"
        return answer

    @staticmethod
    def _num_tokens(request: SimRequest) -> int:
        return request.num_blocks * BLOCK_SIZE + 1

    def _check_answer(self, request: SimRequest, answer: Answer) -> None:
        """What is promised is there, and all that attention needs of it."""
        if answer.num_blocks is None:
            assert any(s.capacity_blocks is None or s.inherits for s in self.settings.stores)
            return
        assert not (request.failed_before and answer.num_blocks), "a failed load is tried again"
        for idx, group in enumerate(self.settings.groups):
            first = group.first_needed(answer.num_blocks, BLOCK_SIZE)
            for position in range(first, answer.num_blocks):
                assert answer.match.sources[idx, position] != ABSENT
                assert self._exists(request.keys[idx][position])
                source = int(answer.match.sources[idx, position])
                assert not source or self.controller.gates.readable(source - 1)

    def _exists(self, key: BlockKey, coming: bool = False) -> bool:
        if self.controller.dram.get(key) is not None:
            return True
        entries = [tier.get(key) for tier in self.controller.stores if tier is not None]
        if any(e is not None and (coming or e.residence is Residence.READY) for e in entries):
            return True
        beliefs = [self.controller.presence.of(s.name, key) for s in self.settings.stores]
        return Belief.PRESENT in beliefs

    def _check_sources(self, job_id: JobId, fresh: bool) -> None:
        """What was promised a moment ago is what will be delivered."""
        job = self.controller.jobs.get(job_id)
        assert job is not None
        if fresh:
            assert all(row.entry is not None or row.source for row in job.rows)

    def _admit(self, request: SimRequest, num_blocks: int, fresh: bool) -> None:
        num_needed = num_blocks * len(self.settings.groups)
        if num_needed > len(self.free):
            return
        first = [g.first_needed(num_blocks, BLOCK_SIZE) for g in self.settings.groups]
        request.block_ids = [
            [NO_BLOCK if i < skip else self.free.pop() for i in range(num_blocks)] for skip in first
        ]
        request.status = "running"
        self.controller.admitted(request.request_id)
        if num_blocks:
            request.status = "loading"
            request.num_computed = num_blocks
            load = LoadRequest(request.request_id, request.keys, request.block_ids, 0, num_blocks)
            job_id = self.controller.allocated(load, self.now)
            self.job_of[job_id] = request
            self._check_sources(job_id, fresh)
            self.controller.overwritten(b for group in request.block_ids for b in group)

    def compute(self) -> None:
        """A running request fills blocks in the coming step; the ranks may settle all at once."""
        request = self._pick("running")
        num_blocks = self.choose(range(1, 4 + 1))
        end = min(request.num_computed + num_blocks, request.num_blocks)
        num_new = (end - request.num_computed) * len(request.keys)
        if num_new > len(self.free):
            return
        for keys, block_ids in zip(request.keys, request.block_ids, strict=True):
            for position in range(request.num_computed, end):
                if position == len(block_ids):
                    block_ids.append(self.free.pop())
                self.fills.append((block_ids[position], keys[position]))
        self.controller.hold_before()
        self.controller.overwritten(block_id for block_id, _ in self.fills)
        request.num_computed = end
        self._offer(request)
        self._run_step()
        self._drop_out_of_window(request)
        if self.choose((False, True)):
            self.answer_all()

    def _drop_out_of_window(self, request: SimRequest) -> None:
        for idx, group in enumerate(self.settings.groups):
            skip = group.first_needed(request.num_computed, BLOCK_SIZE)
            block_ids = request.block_ids[idx]
            self.free += [b for b in block_ids[:skip] if b != NO_BLOCK]
            block_ids[:skip] = [NO_BLOCK] * len(block_ids[:skip])

    def _offer(self, request: SimRequest) -> None:
        for idx, keys in enumerate(request.keys):
            first, end = request.offered[idx], request.num_computed
            if first < end:
                block_ids = request.block_ids[idx]
                reached = [self._exists(key, coming=True) for key in keys[:end]]
                taken = self.controller.computed(keys, block_ids, first, end)
                assert first <= taken <= end
                for i in range(max(first, 1), taken):  # to what is new leads a prefix
                    before = reached[i - 1] or i > first or block_ids[i - 1] == NO_BLOCK
                    assert reached[i] or before
                request.offered[idx] = taken

    def leave(self) -> None:
        """A request loses its blocks or ends, wherever it stands."""
        request = self._pick("running", "waiting", "loading")
        how = self.choose(("preempt", "finish"))
        if request.status == "running":
            self._offer(request)
            self._free(request)
        if how == "preempt" and request.status == "running":
            self.controller.preempted(request.request_id)
            request.failed_before = False
            request.status = "waiting"
        elif request.status == "loading":
            self.controller.finished(request.request_id)
            request.status = "aborted"
        else:
            self.controller.finished(request.request_id)
            self.requests.remove(request)

    def _free(self, request: SimRequest) -> None:
        self.free += [b for group in request.block_ids for b in group if b != NO_BLOCK]
        request.block_ids = [[] for _ in request.block_ids]
        request.offered = [0 for _ in request.offered]
        request.num_computed = 0

    def step(self) -> None:
        """The engine runs a step that computes nothing."""
        self.controller.hold_before()
        self._run_step()

    def _run_step(self) -> None:
        orders = self.controller.take_orders(0, (), self.now)
        self.lookups += self.controller.take_lookups()
        for rank in self.ranks:
            fenced = rank.take(orders)
            blocks, keys = [b for b, _ in self.fills], [k for _, k in self.fills]
            rank.compute(blocks, keys)
            for completion in fenced:
                self._complete(completion)
        self.fills = []

    def answer_all(self) -> None:
        """Every rank answers all it can, and everything came."""
        for rank, job_id in self._answerable():
            self._complete(rank.answer(job_id))

    def answer(self) -> None:
        """One rank answers one hop of any job that can go on, well or badly."""
        rank, job_id = self.choose(self._answerable())
        late, failing = self.choose((False, True)), self.choose((False, True))
        faults = {}
        if failing:
            row = self.choose(range(len(rank.jobs[job_id].keys)))
            faults[row] = self.choose((Outcome.FAILED, Outcome.CORRUPT, Outcome.TIMED_OUT))
        self._complete(rank.answer(job_id, faults, late and failing))

    def _complete(self, completion: Completion) -> None:
        request = self.job_of.get(completion.job_id)
        if request is not None and completion.hop == HBM:
            job = self.controller.jobs.get(completion.job_id)
            assert job is not None
            rows = zip(job.rows, completion.outcomes.tolist(), strict=True)
            request.failed_blocks |= {row.block_id for row, outcome in rows if outcome}
        done = self.controller.completed(completion, self.now)
        if done is not None:
            self._loaded(self.job_of.pop(completion.job_id), done)

    def _loaded(self, request: SimRequest, done: LoadDone) -> None:
        """The engine goes on with what came, or with nothing."""
        assert done.request_id == request.request_id
        held = [b for group in request.block_ids for b in group if b != NO_BLOCK]
        assert done.num_loaded + done.num_failed == len(held)
        assert (done.num_failed > 0) == bool(request.failed_blocks)
        failed, request.failed_blocks = request.failed_blocks, set()
        for keys, block_ids in zip(request.keys, request.block_ids, strict=True):
            for key, block_id in zip(keys, block_ids, strict=False):
                if block_id not in (NO_BLOCK, *failed):
                    assert all(rank.blocks[block_id] == key for rank in self.ranks)
        if request.status == "aborted":
            self._free(request)
            self.requests.remove(request)
            return
        request.failed_before = bool(failed)
        first_group = request.block_ids[0]
        cut = min((first_group.index(b) for b in failed & set(first_group)), default=None)
        if not failed:
            request.status = "running"
        elif cut and len(request.keys) == 1:
            request.status = "running"
            request.num_computed = cut
            self.free += first_group[cut:]
            del first_group[cut:]
        else:
            request.status = "waiting"
            self._free(request)

    def reset(self) -> None:
        """The weights may have changed: what is computed goes on, and is not offered again."""
        for request in self.requests:
            if request.status == "running":
                self._free(request)
                self.controller.preempted(request.request_id)
                request.failed_before = False
                request.status = "waiting"
        self.controller.reset()
        assert self.controller.dram.num_entries == 0

    def answer_lookups(self) -> None:
        """The index reader answers."""
        lookups, self.lookups = self.lookups, []
        for lookup in lookups:
            self.controller.answered(self.media.presence(lookup))

    def break_or_mend_store(self) -> None:
        """A medium stops working, or works again."""
        self.media.break_or_mend(self.choose)

    def drop_shared_frame(self) -> None:
        """Another process evicts."""
        self.media.drop_shared_frame(self.choose)

    def check(self) -> None:
        """Assert that the books agree, and that every READY block is where control thinks."""
        check_controller(self.controller)
        for entry in self.controller.dram.entries():
            if entry.residence is Residence.READY:
                assert all(rank.slots[entry.slot] == entry.key for rank in self.ranks)
        for request in self.requests:
            for key in request.keys[0]:
                if self.controller.presence.of(SHARED, key) is Belief.PRESENT:
                    name = (self.controller.epoch, Rank(), key)
                    assert name in self.media.shared.written, "believed of an earlier epoch"

    def end(self) -> None:
        """Let everything end, and assert that it returns to its start."""
        self._quiesce()
        check_quiet(self.controller)
        self._mend_stores()
        check_quiet(self.controller)
        check_stores(self.controller, self.ranks)
        self.controller.reset()
        self.step()
        self._quiesce()
        check_empty(self.controller)

    def _mend_stores(self) -> None:
        """A store that works again is read again, though no request asks for it."""
        self.media.mend()
        self.now += MAX_BACKOFF_SECONDS
        for _ in range(20):  # frames that another process dropped meanwhile show nothing
            self.step()
            self.answer_all()
        gates = self.controller.gates
        assert all(gates.readable(idx) for idx in range(len(self.settings.stores)))

    def _quiesce(self) -> None:
        for request in list(self.requests):
            if request.status in ("running", "waiting"):
                self.controller.finished(request.request_id)
        for _ in range(200):
            self.step()
            self.answer_all()
            if not self.controller.busy:
                return
        raise AssertionError(f"{len(self.controller.jobs)} jobs never end")

    def _any(self, *statuses: str) -> list[SimRequest]:
        return [request for request in self.requests if request.status in statuses]

    def _pick(self, *statuses: str) -> SimRequest:
        chosen: SimRequest = self.choose(self._any(*statuses))
        return chosen

    def _answerable(self) -> list[tuple[SimRank, JobId]]:
        return [(rank, job_id) for rank in self.ranks for job_id in rank.answerable()]
