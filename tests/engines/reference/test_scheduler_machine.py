"""Whatever users do, no request is lost or starves, and every block has its owners."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import State
from kvtiers.engines.reference.settings import Policy
from kvtiers.model.errors import CapacityError

from .engines import engine_of, hashes_of, request_of, run, settings_of, tiers_of

TIERS = ((), ("memory",), ("nvme", "lmdb"))
# Of steps that a request waits at most, for each request that is there: enough for all of them
# one after another, computed again after every preemption.
STEPS_PER_REQUEST = 300


class SchedulerMachine(RuleBasedStateMachine):
    """A small engine on a virtual clock, with and without kvtiers."""

    @initialize(
        num_blocks=st.sampled_from([17, 24, 40, 90]),
        per_hash=st.sampled_from([1, 2]),
        policy=st.sampled_from(Policy),
        preemption=st.sampled_from(PreemptMode),
        tiers=st.none() | st.sampled_from(TIERS),
        mode=st.sampled_from(["auto", "always", "never"]),
        more=st.fixed_dictionaries(
            {
                "num_speculative_tokens": st.sampled_from([0, 0, 2]),
                "tenant_share": st.sampled_from([1.0, 0.5]),
                "long_prefill_threshold": st.sampled_from([0, 7]),
                "max_num_batched_tokens": st.sampled_from([18, 64]),
                "prefix_caching": st.sampled_from([True, True, False]),
            }
        ),
    )
    def start(self, num_blocks, per_hash, policy, preemption, tiers, mode, more):
        knobs = settings_of(
            num_blocks, policy=policy, preemption=preemption, blocks_per_hash=per_hash, **more
        )
        config = None if tiers is None else tiers_of(*tiers, mode=mode, dram="32KiB")
        self.engine = engine_of(knobs, config)
        self.expected = {}
        self.served = {}
        self.first_admitted = []
        self.num_added = 0

    # -- what users do ----------------------------------------------------------------

    @rule(
        document=st.integers(0, 2),
        num_prompt=st.integers(1, 50),
        max_tokens=st.integers(1, 14),
        num_sequences=st.sampled_from([1, 1, 1, 3]),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 2),
    )
    def add(self, document, num_prompt, max_tokens, num_sequences, tenant, priority):
        knobs = self.engine.settings
        self.num_added += 1
        request = request_of(
            f"r{self.num_added}",
            num_prompt,
            max_tokens,
            arrived_at=self.engine.now,
            block_hashes=hashes_of(document, num_prompt // knobs.hash_tokens),
            num_sequences=num_sequences if self.engine.runner.connector else 1,
            tenant=tenant,
            priority=priority,
        )
        try:
            self.engine.add(request)
        except CapacityError:
            return
        self.expected[request.request_id] = request

    @rule(num=st.sampled_from([1, 1, 4]))
    def step(self, num):
        for _ in range(num):
            self._step()

    @rule(data=st.data())
    def abort(self, data):
        live = sorted(set(self.expected) - set(self.served))
        if live:
            self.engine.abort(data.draw(st.sampled_from(live)))

    @rule()
    def reset(self):
        assert self.engine.reset()
        assert self.engine.pool.num_cached == 0

    @rule()
    def wait(self):
        if not self.engine.num_unfinished:
            self.engine.wait_until(self.engine.now + 0.01)

    def _step(self):
        engine = self.engine
        report = engine.step(idle_until=engine.now + 1.0)
        knobs = engine.settings
        assert sum(report.num_tokens.values()) <= knobs.max_num_batched_tokens
        if report.admitted or report.resumed:
            # What finished in the step has only made room since.
            assert engine.pool.num_free >= knobs.watermark_blocks
        for served in report.finished:
            assert served.request_id not in self.served, "finished twice"
            self.served[served.request_id] = served
        self.first_admitted += [name for name in report.admitted if name not in self.first_admitted]

    # -- what is always true ----------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        places = {
            State.RUNNING: scheduler.running,
            State.WAITING: [it for it in scheduler.queue if it.state is not State.SWAPPED],
            State.SWAPPED: [it for it in scheduler.queue if it.state is State.SWAPPED],
        }
        assert len(places[State.SWAPPED]) == scheduler.num_swapped
        where = Counter(r.request_id for requests in places.values() for r in requests)
        assert set(where.values()) <= {1}
        assert len(where) == self.engine.num_unfinished
        for state, requests in places.items():
            for request in requests:
                assert request.state is state is self.engine.state(request.request_id)
                assert state is State.RUNNING or request.num_blocks == 0
        assert set(where) <= set(self.expected)
        assert not set(where) & set(self.served)

    @invariant()
    def each_block_has_its_owners(self):
        if not hasattr(self, "engine"):
            return
        pool, per_hash = self.engine.pool, self.engine.settings.blocks_per_hash
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
                assert sequence.num_computed <= len(sequence.block_ids) * 4
                assert sequence.num_computed <= sequence.num_known
        assert 0 not in owners
        assert all(pool.refs(block_id) == num for block_id, num in owners.items())
        assert pool.num_free == pool.num_blocks - len(owners)

    @invariant()
    def the_batch_is_bounded(self):
        if hasattr(self, "engine"):
            running = self.engine.scheduler.running
            assert sum(r.num_places for r in running) <= self.engine.settings.max_num_seqs

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        num_steps = 0
        while self.engine.num_unfinished or len(self.served) < len(self.expected):
            self._step()
            num_steps += 1
            assert num_steps < STEPS_PER_REQUEST * (1 + len(self.expected)), self.engine.gauges
        assert set(self.served) == set(self.expected), "a request was lost"
        for name, served in self.served.items():
            wanted = self.expected[name]
            if served.reason != "aborted":
                assert served.num_output_tokens == wanted.max_tokens * wanted.num_sequences
        self._check_order()
        self.engine.settle()
        pool = self.engine.pool
        assert pool.num_free == pool.num_blocks
        assert not self.engine.holders()
        connector = self.engine.runner.connector
        if connector is not None:
            assert not connector.busy
            assert connector.controller.dram.num_pins == 0
        self.engine.close()

    def _check_order(self):
        """First come, first admitted; under priority only among equals, and tenants apart."""
        knobs = self.engine.settings
        by_queue = {}
        for name in self.first_admitted:
            request = self.expected[name]
            rank = request.priority if knobs.policy is Policy.PRIORITY else 0
            tenant = request.tenant if knobs.tenant_share < 1 else ""
            by_queue.setdefault((rank, tenant), []).append(int(name[1:]))
        if self.engine.runner.connector is None:  # else one may wait for a lookup
            assert all(order == sorted(order) for order in by_queue.values())


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_scheduler_keeps_its_promises = pytest.mark.filterwarnings("ignore::pytest.PytestWarning")(
    SchedulerMachine.TestCase
)


def test_memory_returns_to_its_start_after_everything_at_once():
    """The machine's sequence that exercises most: groups, swaps, aborts in a load, a reset."""
    slow = LinkSeed(0.05, 1e-3, 1e8)  # so that loads outlast steps
    links = dict.fromkeys(("hbm>dram", "dram>hbm", "nvme>dram", "dram>nvme"), slow)
    knobs = settings_of(40, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of("nvme", mode="always"), links=links)
    for idx in range(12):
        hashes = hashes_of(idx % 3, 11)
        name = f"r{idx}"
        engine.add(request_of(name, 44, 12, block_hashes=hashes, num_sequences=1 + idx % 2 * 2))
    aborted = False
    for _ in range(60):
        report = engine.step()
        if not aborted and report.gauges.num_loading:
            loading = next(r for r in engine.scheduler.running if r.loading)
            engine.abort(loading.request_id)
            aborted = True
    engine.reset()
    run(engine)
    engine.settle()
    assert aborted
    assert engine.gauges.num_swaps > 0
    assert engine.pool.num_free == engine.pool.num_blocks
