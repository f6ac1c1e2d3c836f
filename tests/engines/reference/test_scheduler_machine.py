"""Whatever users do, no request is lost or starves, and every block has its owners."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvtiers.cost.preempt import PreemptMode

from .engines import SLOW, engine_of, hashes_of, request_of, run, settings_of, tiers_of
from .machine import KNOBS, EngineMachine, Failing

TIERS = ((), ("memory",), ("nvme", "lmdb"))


class SchedulerMachine(EngineMachine):
    """A small engine on a virtual clock, with and without kvtiers."""

    failing = None

    @initialize(
        per_hash=st.sampled_from([1, 2]),
        tiers=st.none() | st.sampled_from(TIERS),
        mode=st.sampled_from(["auto", "always", "never"]),
        offload=st.sampled_from(["eager", "lazy"]),
        links=st.sampled_from([{}, SLOW]),
        sync_below=st.sampled_from(["0ms", "5ms", "1s"]),
        knobs=KNOBS,
    )
    def start(self, per_hash, tiers, mode, offload, links, sync_below, knobs):
        knobs = settings_of(blocks_per_hash=per_hash, **knobs)
        if tiers is None:
            self.begin(engine_of(knobs))
            return
        config = tiers_of(*tiers, mode=mode, offload=offload, dram="32KiB", sync_below=sync_below)
        self.begin(engine_of(knobs, config, **links))
        self.failing = Failing(self.engine)

    def make_request(self, name, content, num_prompt, max_tokens, **more):
        num = num_prompt // self.engine.settings.hash_tokens
        return request_of(
            name,
            num_prompt,
            max_tokens,
            arrived_at=self.engine.now,
            block_hashes=hashes_of(content, num),
            **more,
        )

    @precondition(lambda self: self.failing)
    @rule(rows=st.lists(st.integers(0, 12), min_size=1, max_size=3))
    def fail_loads(self, rows):
        self.failing.rows.extend(rows)


SchedulerMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_scheduler_keeps_its_promises = pytest.mark.filterwarnings("ignore::pytest.PytestWarning")(
    SchedulerMachine.TestCase
)


def test_memory_returns_to_its_start_after_everything_at_once():
    """The machine's sequence that exercises most: groups, swaps, aborts in a load, a reset."""
    knobs = settings_of(40, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of("nvme", mode="always"), **SLOW)
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
