"""An engine under whatever users, connectors and links do, and what is true of it all the time."""

from collections import Counter, deque
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtiers.connector.step import Reload
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import State
from kvtiers.engines.reference.settings import Policy
from kvtiers.model.errors import CapacityError
from kvtiers.model.messages import HBM
from kvtiers.model.outcome import Outcome

# Of steps that a request waits at most, for each request that is there: enough for all of them
# one after another, computed again after every preemption.
STEPS_PER_REQUEST = 300
KNOBS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([17, 21, 30, 90]),
        "policy": st.sampled_from(Policy),
        "preemption": st.sampled_from(PreemptMode),
        "num_speculative_tokens": st.sampled_from([0, 0, 2]),
        "tenant_share": st.sampled_from([1.0, 0.5]),
        "long_prefill_threshold": st.sampled_from([0, 7]),
        "max_num_batched_tokens": st.sampled_from([18, 64]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "watermark": st.sampled_from([0.0, 0.05]),
    }
)
REQUESTS = st.fixed_dictionaries(
    {
        "content": st.integers(0, 2),
        "num_prompt": st.integers(1, 40),
        "max_tokens": st.integers(1, 24),
        "num_sequences": st.sampled_from([1, 1, 1, 3]),
        "tenant": st.sampled_from("ab"),
        "priority": st.integers(0, 2),
    }
)
SELDOM = st.sampled_from([False, False, False, True])
MOODS = ("late", "some", "nothing", "all")


class Moody:
    """Makes a connector answer late, or offer less than it could, for its next answers."""

    def __init__(self, connector, block_tokens):
        self.moods = deque()
        self.num_late = 0
        self._ask = connector.reloadable
        self._size = block_tokens
        connector.reloadable = self._reloadable

    def _reloadable(self, *question):
        mood = self.moods.popleft() if self.moods else "all"
        answer = Reload(None, asynchronous=False) if mood == "late" else self._ask(*question)
        self.num_late += answer.num_tokens is None
        if mood == "all" or not answer.num_tokens:
            return answer
        num = answer.num_tokens // self._size // 2 * self._size if mood == "some" else 0
        return replace(answer, num_tokens=num, asynchronous=answer.asynchronous and num > 0)


class Failing:
    """Makes blocks of a modelled rank's next loads arrive damaged."""

    def __init__(self, engine):
        self.rows = deque()
        rank = engine.runner._rank
        push = rank._push

        def pushed(time, event):
            if event.hop == HBM and self.rows:
                event.outcomes[self.rows.popleft() % len(event.outcomes)] = Outcome.CORRUPT
            push(time, event)

        rank._push = pushed


class EngineMachine(RuleBasedStateMachine):
    """What users do, and what holds; how the engine is made is for the kinds of it to say."""

    engine = None
    moody = None

    def begin(self, engine):
        self.engine = engine
        connector = engine.runner.connector
        self.moody = connector and Moody(connector, engine.settings.hash_tokens)
        self.expected = {}
        self.served = {}
        self.first_admitted = []
        self.num_added = 0

    def make_request(self, name, content, num_prompt, max_tokens, **more):
        """Return a request; equal contents have equal tokens."""
        raise NotImplementedError

    def check_served(self, request, served):
        """Check what a request got."""

    def live(self):
        return sorted(set(self.expected) - set(self.served))

    # -- what users do ----------------------------------------------------------------

    @rule(rows=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, rows):
        for row in rows:
            self._add(**row)

    def _add(self, content, num_prompt, max_tokens, num_sequences, tenant, priority):
        self.num_added += 1
        request = self.make_request(
            f"r{self.num_added}",
            content,
            num_prompt,
            max_tokens,
            num_sequences=num_sequences if self.moody else 1,
            tenant=tenant,
            priority=priority,
        )
        try:
            self.engine.add(request)
        except CapacityError:
            return
        self.expected[request.request_id] = request

    @rule(num=st.sampled_from([1, 1, 4, 9]))
    def step(self, num):
        for _ in range(num):
            self._step()

    @rule(now=SELDOM, idx=st.integers(0, 20))
    def abort(self, now, idx):
        if now and idx < len(self.live()):
            self.engine.abort(self.live()[idx])

    @rule(idx=st.integers(0, 5))
    def preempt(self, idx):
        """As where memory ran out, at any point of a request's life."""
        victims = [it for it in self.engine.scheduler.running if not it.loading]
        if idx < len(victims):
            self.engine.scheduler.preempt(victims[idx])

    @rule(now=SELDOM)
    def reset(self, now):
        if now:
            assert self.engine.reset()
            assert self.engine.pool.num_cached == 0

    @rule()
    def wait(self):
        if not self.engine.num_unfinished:
            self.engine.wait_until(self.engine.now + 0.01)

    @precondition(lambda self: self.moody)
    @rule(moods=st.lists(st.sampled_from(MOODS), min_size=1, max_size=6))
    def answer_otherwise(self, moods):
        self.moody.moods.extend(moods)

    def _step(self):
        engine = self.engine
        decoding = [it for it in engine.scheduler.running if not it.loading and self._decodes(it)]
        report = engine.step(idle_until=engine.now + 1.0)
        knobs = engine.settings
        assert sum(report.num_tokens.values()) <= knobs.max_num_batched_tokens
        assert all(report.num_tokens.values()), "a sequence was given no token"
        given = {*report.num_tokens, *report.preempted}
        assert {it.request_id for it in decoding} <= given, "each that runs gets its next token"
        if report.admitted or report.resumed:
            # What finished in the step has only made room since.
            assert engine.pool.num_free >= knobs.watermark_blocks
        assert set(report.swapped) <= set(report.preempted)
        assert not (report.preempted and (report.admitted or report.resumed))
        assert not set(report.preempted) & set(report.num_tokens), "computed without blocks"
        for served in report.finished:
            name = served.request_id
            assert name not in self.served, "finished twice"
            self.served[name] = served
            self._check_counts(self.expected[name], served)
            self.check_served(self.expected[name], served)
        self.first_admitted += [name for name in report.admitted if name not in self.first_admitted]

    @staticmethod
    def _decodes(request):
        return any(sequence.num_missing == 1 for sequence in request.live)

    # -- what is always true ----------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self):
        if self.engine is None:
            return
        scheduler = self.engine.scheduler
        places = {
            State.RUNNING: scheduler.running,
            State.WAITING: [it for it in scheduler.queue if it.state is not State.SWAPPED],
            State.SWAPPED: [it for it in scheduler.queue if it.state is State.SWAPPED],
        }
        where = Counter(r.request_id for requests in places.values() for r in requests)
        assert set(where.values()) <= {1}
        assert len(where) == self.engine.num_unfinished
        gauges = self.engine.gauges
        assert gauges.num_swapped == len(places[State.SWAPPED])
        assert gauges.num_waiting == len(places[State.WAITING])
        for state, requests in places.items():
            for request in requests:
                assert request.state is state is self.engine.state(request.request_id)
                assert state is State.RUNNING or request.num_blocks == 0
        assert set(where) <= set(self.expected)
        assert not set(where) & set(self.served)

    @invariant()
    def each_block_has_its_owners(self):
        if self.engine is None:
            return
        pool, knobs = self.engine.pool, self.engine.settings
        per_hash = knobs.blocks_per_hash
        owners = Counter()
        content = {}
        for request in self.engine.holders():
            owners.update(request.spare_block_ids)
            for sequence in request.sequences:
                assert len(set(sequence.block_ids)) == len(sequence.block_ids)
                owners.update(sequence.block_ids)
                for idx, block_id in enumerate(sequence.block_ids):
                    hashes = sequence.hashes[: idx // per_hash + 1]
                    known = hashes[idx // per_hash] if len(hashes) > idx // per_hash else sequence
                    assert content.setdefault(block_id, known) == known, "two contents"
                assert sequence.num_computed <= len(sequence.block_ids) * knobs.block_size
                assert sequence.num_computed <= sequence.num_known
        assert 0 not in owners
        assert all(pool.refs(block_id) == num for block_id, num in owners.items())
        assert pool.num_free == pool.num_blocks - len(owners)
        assert abs(self.engine.gauges.kv_use * pool.num_blocks - len(owners)) < 1e-6

    @invariant()
    def the_batch_is_bounded(self):
        if self.engine is not None:
            running = self.engine.scheduler.running
            assert sum(r.num_places for r in running) <= self.engine.settings.max_num_seqs

    def teardown(self):
        if self.engine is None:
            return
        try:
            self._end()
        finally:
            self.engine.close()

    def _end(self):
        num_steps = 0
        while self.engine.num_unfinished or len(self.served) < len(self.expected):
            self._step()
            self.each_request_is_in_one_place()
            self.each_block_has_its_owners()
            self.the_batch_is_bounded()
            num_steps += 1
            assert num_steps < STEPS_PER_REQUEST * (1 + len(self.expected)), self.engine.gauges
        assert set(self.served) == set(self.expected), "a request was lost"
        self._check_order()
        self.engine.settle()
        pool = self.engine.pool
        assert pool.num_free == pool.num_blocks
        assert not self.engine.holders()
        connector = self.engine.runner.connector
        if connector is not None:
            assert not connector.busy
            assert connector.controller.dram.num_pins == 0
            assert not connector.controller.outlook.running

    def _check_counts(self, wanted, served):
        """What a request got and cost adds up."""
        most = wanted.max_tokens * wanted.num_sequences
        assert served.num_output_tokens <= most
        if served.reason == "length":
            assert served.num_output_tokens == most
        if served.reason != "aborted":
            assert served.arrived_at <= served.admitted_at <= served.first_token_at
            assert served.first_token_at <= served.finished_at
        assert served.num_recomputed_tokens <= served.num_computed_tokens
        assert served.num_reloaded_tokens >= 0
        assert all(num >= 0 for num in served.reloaded_by_tier.values())

    def _check_order(self):
        """First come, first admitted; under priority only among equals, and tenants apart."""
        knobs = self.engine.settings
        by_queue = {}
        for name in self.first_admitted:
            request = self.expected[name]
            rank = request.priority if knobs.policy is Policy.PRIORITY else 0
            tenant = request.tenant if knobs.tenant_share < 1 else ""
            by_queue.setdefault((rank, tenant), []).append(int(name[1:]))
        if not self.moody or not self.moody.num_late:  # else others need not wait for a lookup
            assert all(order == sorted(order) for order in by_queue.values())
