"""What can happen to a request between its arrival and its end, through the connector."""

from __future__ import annotations

import pytest
from lives import ALWAYS, Told, count, fake, forget_hbm

from kvtiers.connector.step import Reload
from kvtiers.data.copier import Direction
from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import DRAM, Link, WorkerReport
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_engine import Setup, prompt_of, random_work
from kvtiers.testing.fake_step import EngineSettings
from kvtiers.testing.invariants import check_quiet

LOADS_BETWEEN_STEPS = {**ALWAYS, "reload": {"sync_below": "0ms"}}


# -- admission and lookup -----------------------------------------------------------------


def test_loads_that_hold_all_blocks_do_not_stop_the_engine():
    """R11: pool of 270 blocks, all stored: 250 + 5, 100 and 10 blocks at once."""
    size = 4
    settings = EngineSettings(num_blocks=271, block_size=size, max_step_tokens=64)
    engine = fake(Setup(engine=settings, num_slots=400, options=LOADS_BETWEEN_STEPS))
    wanted = [(1, 250 * size + 1), (2, 100 * size + 1), (3, 10 * size + 1)]
    for document, num_tokens in wanted:
        engine.generate(prompt_of(document, num_tokens))
    forget_hbm(engine)
    for document, num_tokens in wanted:
        engine.add(prompt_of(document, num_tokens), 5 * size if document == 1 else 3)
    assert engine.drain() < 200
    engine.end()


def test_a_thousand_aborted_loads_leak_no_block():
    """R13: aborted while it waits, and while the step runs that ends the load."""
    engine = fake(Setup(num_slots=60, options=LOADS_BETWEEN_STEPS))
    prompt = prompt_of(1, 41)
    engine.generate(prompt)
    forget_hbm(engine)
    for number in range(1000):
        request = engine.add(prompt, 1)
        engine.step(abort=[request.request_id] if number % 2 else ())
        if request.request_id in engine.scheduler.requests:
            engine.scheduler.abort(request.request_id)
        if number % 10 == 0:
            engine.drain()
            forget_hbm(engine)
    engine.end()
    assert count(engine.connector, "blocks_reloaded_total", DRAM) > 1000


@pytest.mark.parametrize("taken", [0, 32, 64])
def test_an_allocation_may_take_less_than_was_found(taken):
    """R17: 64 found; 0, 32, 64 taken."""
    told = Told()
    told.store(4)
    told.connector.arrived("r", told.hashes(4))
    assert told.connector.reloadable("r", told.hashes(4), 65, 0).num_tokens == 64
    told.connector.allocated("r", (list(range(1, 6)),), 0, Reload(taken, asynchronous=True))
    orders = told.step()
    assert sum(transfer.num_blocks for transfer in orders.before) == taken // 16
    told.answer(orders)
    told.connector.finished("r", ([],))
    check_quiet(told.connector.controller)


@pytest.mark.parametrize("taken", [8, 40, 80])
def test_an_allocation_of_what_was_never_found_is_refused(taken):
    """R17: half a block, two and a half, more than there is."""
    told = Told()
    told.store(4)
    told.connector.reloadable("r", told.hashes(4), 65, 0)
    with pytest.raises(ProtocolError, match=f"{taken} tokens"):
        told.connector.allocated("r", (list(range(1, 6)),), 0, Reload(taken, asynchronous=True))
    check_quiet(told.connector.controller)


def test_a_repeated_allocation_is_refused_and_starts_nothing():
    """R17: twice in a row."""
    told = Told()
    told.store(4)
    reload = told.connector.reloadable("r", told.hashes(4), 65, 0)
    told.connector.allocated("r", (list(range(1, 6)),), 0, reload)
    with pytest.raises(ProtocolError, match="not offered"):
        told.connector.allocated("r", (list(range(1, 6)),), 0, reload)
    assert len(told.connector.controller.jobs) == 1
    with pytest.raises(ProtocolError, match="never looked up"):
        told.connector.allocated("stranger", ([1],), 0, reload)


def test_a_preemption_of_an_unknown_request_is_refused():
    with pytest.raises(ProtocolError, match="'nobody' has not arrived, or has ended"):
        Told().connector.preemption("nobody", 100)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_stored", [0, 1, 2, 5])
def test_matched_tokens_against_a_brute_force_oracle(block_size, num_stored):
    """R18, R19: every prompt length around block boundaries, every local hit."""
    told = Told(block_size)
    if num_stored:
        told.store(num_stored)
    for num_tokens in range(1, 6 * block_size):
        hashes = told.hashes(num_tokens // block_size)
        for num_local in range(0, num_tokens, block_size):
            found = told.connector.reloadable("r", hashes, num_tokens, num_local).num_tokens
            loadable = [
                n
                for n in range(0, num_tokens - num_local, block_size)
                if num_local + n <= min(num_stored * block_size, num_tokens - 1)
            ]
            assert found == max(loadable, default=0), (num_tokens, num_local)
            told.connector.finished("r", ([],))


def test_blocks_on_their_way_are_not_loaded_within_a_step():
    """Whether they arrive is not known yet: the load could fail for a reason of its own."""
    told = Told()
    told.connector.arrived("first", told.hashes(4))
    orders = told.step({"first": 64})
    assert told.connector.reloadable("r", told.hashes(4), 65, 0) == Reload(64, asynchronous=True)
    told.answer(orders)
    assert told.connector.reloadable("r", told.hashes(4), 65, 0) == Reload(64, asynchronous=False)


def test_a_lookup_that_came_to_nothing_leaves_no_work():
    """R20: found, never given blocks, aborted."""
    told = Told()
    told.store(4)
    assert told.connector.reloadable("r", told.hashes(4), 65, 0).num_tokens == 64
    assert not told.connector.busy
    told.connector.finished("r", ([],))
    assert not told.connector.busy
    check_quiet(told.connector.controller)


def test_a_namesake_of_a_request_whose_load_failed_may_load():
    """R20: the request itself must not, or it would loop; nothing of that outlives it."""
    told = Told()
    told.store(4)
    question = "r", told.hashes(4), 65, 0
    told.connector.allocated("r", (list(range(1, 6)),), 0, told.connector.reloadable(*question))
    told.answer(told.step({"r": 65}), Outcome.TIMED_OUT)
    assert told.connector.reloadable(*question).num_tokens == 0
    told.connector.finished("r", ([],))
    assert told.connector.reloadable(*question).num_tokens == 64


@pytest.mark.parametrize("block_ids", [(), ([],)])
def test_an_end_without_blocks_stores_nothing(block_ids):
    """R21: preempted in its last step."""
    told = Told(policy={"offload": "lazy"})
    told.connector.arrived("r", told.hashes(2))
    told.answer(told.step({"r": 32}))
    told.answer(told.step(preempted=("r",)))
    stored = told.connector.controller.dram.num_entries
    told.connector.finished("r", block_ids)
    told.connector.finished("r", block_ids)
    assert told.connector.controller.dram.num_entries == stored == 2
    assert not told.step().before


def test_all_ranks_poll_alike_however_fast_each_is():
    """R22: 4 ranks that lag differently."""
    done = random_work(Setup(num_ranks=4, options=ALWAYS), 11, 200)
    assert len({worker.executor.num_polls for worker in done.workers}) == 1


# -- failed loads ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [ALWAYS, LOADS_BETWEEN_STEPS], ids=["in a step", "between"])
def test_a_failed_load_costs_time_only(options):
    """R32: the device refuses the copy; the same request computes it, the next one loads it."""
    engine = fake(Setup(num_slots=60, options=options))
    prompt = prompt_of(2, 41)
    first = engine.generate(prompt)
    forget_hbm(engine)
    engine.workers[0].device.num_refused[Direction.SCATTER] = 1
    again = engine.generate(prompt)
    assert count(engine.connector, "blocks_failed_total", "failed") == 10
    forget_hbm(engine)
    third = engine.generate(prompt)
    assert first.tokens == again.tokens == third.tokens
    assert count(engine.connector, "blocks_reloaded_total", DRAM) == 10
    assert engine.scheduler.num_matched_calls[again.request_id] <= 2  # it does not loop
    engine.end()


def test_blocks_of_a_load_that_nobody_has_confirmed_are_not_kept():
    """An abort comes between a step and the news that its load failed."""
    told = Told(policy={"offload": "lazy"})
    told.connector.arrived("w", told.hashes(2))
    told.step({"w": 32})
    told.connector.finished("w", ([100, 101],))
    told.answer(told.step())
    reload = told.connector.reloadable("r", told.hashes(3), 50, 0)
    assert not reload.asynchronous
    told.connector.allocated("r", ([1, 2, 3, 4],), 0, reload)
    orders = told.step({"r": 50})
    told.connector.finished("r", ([1, 2, 3, 4],))
    told.answer(orders, Outcome.FAILED)
    assert not told.step().before
    assert told.connector.controller.dram.num_entries == 0


def test_a_request_preempted_after_a_failed_load_offers_nothing_false():
    """Its blocks hold whatever was there before."""
    told = Told()
    told.store(2)
    reload = told.connector.reloadable("r", told.hashes(4), 65, 0)
    told.connector.allocated("r", ([1, 2, 3, 4, 5],), 0, reload)
    orders = told.step({"r": 65})
    told.answer(orders, Outcome.FAILED)
    told.answer(told.step(preempted=("r",)))
    assert told.connector.controller.dram.num_entries == 0


def test_hits_never_outgrow_lookups_over_preemptions():
    """R90: counters only grow, and no update of them is refused."""
    settings = EngineSettings(num_blocks=14)
    preempted = 0
    for seed in range(6):
        done = random_work(Setup(engine=settings, options=ALWAYS), seed, 300)
        counters = done.connector.counters
        hits = sum(v for (n, _), v in counters.snapshot().counters.items() if "hit_tokens" in n)
        assert hits <= counters.value("kvtiers_lookup_tokens_total")
        assert not any("metric_errors" in name for name, _ in counters.snapshot().counters)
        calls = done.scheduler.num_matched_calls
        preempted += sum(num > 1 for num in calls.values())
    assert preempted


def test_requests_that_may_not_hit_are_not_counted():
    """R92: prompt log-probabilities were asked for."""
    engine = fake()
    prompt = prompt_of(1, 30)
    engine.add(prompt, 2, skip_reading_prefix_cache=True)
    engine.drain()
    assert count(engine.connector, "lookup_tokens_total") == 0
    forget_hbm(engine)
    engine.generate(prompt)
    assert count(engine.connector, "lookup_tokens_total") == 30


def test_two_engines_in_one_process_do_not_meet():
    """R91: same names, separate books."""
    one, other = fake(), fake()
    one.generate(prompt_of(1, 30))
    assert count(one.connector, "blocks_offloaded_total", DRAM) > 0
    assert count(other.connector, "blocks_offloaded_total", DRAM) == 0


def test_a_link_with_a_queue_is_not_chosen():
    """R108: the same request with nothing and with 64 loads ahead of it."""
    told = Told(num_slots=200, cost={"mode": "auto"})
    told.store(64)
    question = told.hashes(64), 64 * 16 + 1, 0
    assert told.connector.reloadable("idle", *question).num_tokens == 64 * 16
    links = told.connector.controller.cost.links
    links.submitted("dram>hbm", 2**50)
    assert told.connector.reloadable("busy", *question).num_tokens == 0
    links.done("dram>hbm", 2**50)
    assert told.connector.reloadable("later", *question).num_tokens == 64 * 16


def test_a_link_that_was_found_slow_is_not_chosen():
    """R109: by what the ranks report, job by job."""
    told = Told(num_slots=200, cost={"mode": "auto"})
    told.store(64)
    question = told.hashes(64), 64 * 16 + 1, 0
    assert told.connector.reloadable("before", *question).num_tokens == 64 * 16
    slow = Link("dram>hbm", 64, 64 * 2**20, 1000.0)
    for _ in range(20):
        told.connector.reported(WorkerReport(links=(slow,)))
    assert told.connector.reloadable("after", *question).num_tokens == 0


def test_blocks_that_another_connector_fills_are_read_before():
    """R05: the engine gives freed blocks to a load that is none of ours."""
    told = Told()
    told.connector.reloadable("a", told.hashes(4), 65, 0)
    told.connector.allocated("a", [[100, 101, 102, 103]], 0, Reload(0, asynchronous=False))
    (offload,) = told.step({"a": 64}).after
    told.connector.finished("a", [[100, 101, 102, 103]])
    told.connector.reloadable("b", told.hashes(4, "q"), 65, 0)
    told.connector.allocated("b", [[102, 103, 104, 105]], 0, Reload(0, asynchronous=False))
    ((job_id, blocks),) = told.step().fences.items()
    assert (job_id, blocks.tolist()) == (offload.job_id, [102, 103])


def test_offloads_beside_a_load_of_another_connector_that_failed_are_not_served():
    told = Told()
    told.connector.reloadable("a", told.hashes(4), 65, 0)
    told.connector.allocated("a", [[100, 101, 102, 103]], 0, Reload(0, asynchronous=False))
    orders = told.step({"a": 64})
    told.answer(orders)
    told.connector.distrust()
    told.connector.finished("a", [[100, 101, 102, 103]])
    told.answer(told.step())
    assert told.connector.reloadable("b", told.hashes(4), 65, 0) == Reload(0, asynchronous=False)


def test_plan_counts_those_that_wait_behind_a_request(monkeypatch):
    told = Told()
    told.store(4)
    seen = []
    plan = told.connector.controller.cost.plan

    def spy(sources, valid, prompt):
        seen.append(prompt.num_waiting)
        return plan(sources, valid, prompt)

    monkeypatch.setattr(told.connector.controller.cost, "plan", spy)
    for name in "abc":
        told.connector.arrived(name, told.hashes(4))
    taken = told.connector.reloadable("a", told.hashes(4), 65, 0)
    told.connector.allocated("a", [[1, 2, 3, 4, 5]], 0, taken)
    told.connector.reloadable("b", told.hashes(4), 65, 0)
    told.connector.finished("c", ([],))
    told.step({"a": 65})
    told.connector.arrived("d", told.hashes(4))
    told.connector.reloadable("d", told.hashes(4), 65, 0)
    assert seen == [2, 1, 1]
